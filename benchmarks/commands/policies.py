"""Those commands that compare named policies on whole pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sd_lowvram.commands.values import check_count, check_given, check_run
from sd_lowvram.errors import BadInputError
from sd_lowvram.units import parse_size

from .options import Debug, Json, Out, measuring

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or .safetensors file; left out: the demo model.", metavar="PATH"),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", help="May be repeated; left out: all that run here. generate --help tells them.", metavar="NAME"
    ),
]
Size = Annotated[int, typer.Option(help="Side of the square picture in pixels.")]
Steps = Annotated[int, typer.Option(help="Denoising steps of a picture.")]
_MOST_RUNS = 10_000


def warmup(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    steps: Steps = 8,
    runs: Annotated[int, typer.Option(help="Pictures after the first.")] = 5,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How much longer the first picture after loading takes, and in which part; each policy in its own process."""
    with measuring(debug, not as_json):
        _check(model, size, steps)
        check_count("--runs", runs, _MOST_RUNS)
        from ..warmup import lines, run

        _show(run(model, policy or (), size=size, steps=steps, runs=runs, out=out), lines, as_json)


def variance(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    steps: Steps = 8,
    runs: Annotated[int, typer.Option(help="Pictures in a row after the first.")] = 30,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Many equal pictures in a row: standard deviation and coefficient of variation of their times."""
    with measuring(debug, not as_json):
        _check(model, size, steps)
        check_count("--runs", runs, _MOST_RUNS, 2)
        from ..variance import lines, run

        _show(run(model, policy or (), size=size, steps=steps, runs=runs, out=out), lines, as_json)


def steps(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    last: Annotated[int, typer.Option("--to", help="The most steps; they begin with 10, by tens.")] = 100,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Seconds by the number of steps: the line through them, and how well it fits."""
    with measuring(debug, not as_json):
        _check(model, size, last)
        check_count("--to", last, 1000, 20)
        from ..steps import lines, run

        _show(run(model, policy or (), size=size, counts=range(10, last + 1, 10), out=out), lines, as_json)


def fit(
    matrix: Annotated[
        list[Path] | None, typer.Argument(help="JSON files of matrix, beside the published ones.", metavar="FILE")
    ] = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Second-order polynomials of the pixels against the seconds of matrices, small pictures apart."""
    with measuring(debug, not as_json):
        from ..fit import lines, run

        _show(run(matrix or (), out=out), lines, as_json)


def same(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    steps: Steps = 8,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Whether the picture is the same by every policy and by each twice: bits, and differences of 8-bit values."""
    with measuring(debug, not as_json):
        _check(model, size, steps)
        from ..same import lines, run

        _show(run(model, policy or (), size=size, steps=steps, out=out), lines, as_json)


def peers(
    size: Annotated[int, typer.Option(help="Side of the square picture in pixels.")] = 256,
    steps: Steps = 8,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """diffusers' own ways to save memory beside ours: seconds, peaks by the same counters, and the picture."""
    with measuring(debug, not as_json):
        _check(None, size, steps)
        from ..peers import lines, run

        _show(run(size=size, steps=steps, out=out), lines, as_json)


def cards(
    card: Annotated[
        list[str] | None, typer.Option("--gpu", help="Left out: four; may be repeated.", metavar="NAME")
    ] = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Seconds and peak of SD1.5 foretold for cards, by ours and by diffusers as it is."""
    with measuring(debug, not as_json):
        from ..cards import CARDS, lines, run

        _show(run(card or CARDS, out=out), lines, as_json)


def max_size(
    model: Model = None,
    policy: Policies = None,
    card: Annotated[
        str | None, typer.Option("--gpu", help="Foretell SD1.5's for this card; left out: runs here.", metavar="NAME")
    ] = None,
    cap: Annotated[str, typer.Option("--vram", help="The cap of the runs here.", metavar="SIZE")] = "96MB",
    steps: Steps = 1,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The largest square picture by each policy: run here under a cap, each confirmed, or foretold for a card."""
    with measuring(debug, not as_json):
        _check(model, 64, steps)
        check_given(gpu=card)
        if card is not None and model is not None:
            raise BadInputError(f"--gpu {card} foretells SD1.5: leave out --model {model}, or --gpu")
        from sd_lowvram.policies.named import POLICIES

        from ..max_size import foretold, lines, measured

        if card is not None:
            found = foretold(card, policy or tuple(POLICIES), out=out)
        else:
            found = measured(model, policy or (), cap=parse_size(cap, "--vram"), steps=steps, out=out)
        _show(found, lines, as_json)


def _check(model: str | None, size: int, steps: int) -> None:
    check_given(model=model)
    check_run(size, size, steps, 1, None, None)


def _show(report: dict[str, Any], lines: Any, as_json: bool) -> None:
    from ..tables import show

    show(report, lines(report), as_json)
