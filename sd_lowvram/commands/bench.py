"""``sd-lowvram bench``: measurements, each in pairs within one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.architectures import NAMES
from .guard import guarded
from .values import check_count, check_names, check_side

_MOST_BUDGETS = 100
bench = typer.Typer(help="Measure: both sides in one process in turn, ratio of medians.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Models = Annotated[
    list[str] | None, typer.Option("--model", "-m", help="sd15, sd21 or sdxl; may be repeated.", metavar="NAME")
]
Out = Annotated[Path | None, typer.Option("--out", help="Write the table as Markdown too.")]
Side = Annotated[int | None, typer.Option(help="Left out: sizes that are usual for the model.")]


@contextlib.contextmanager
def _measuring(debug: bool, shown: bool = True) -> Iterator[None]:
    """Inside, progress is shown, and errors as :func:`guarded` tells them."""
    with guarded(debug):
        from rich.console import Console

        from .show import Bars

        with Bars(Console(stderr=True), shown).running():
            yield


@bench.command()
def vae(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose autoencoder: sd15, sdxl, flux or flux2.", metavar="NAME")
    ] = "sd15",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Exact tiles beside the plain decode: time, peak, and how far every way is from it."""
    with _measuring(debug, not as_json):
        from ..bench.vae import run

        run(json=as_json, model=model)


@bench.command()
def end_to_end(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="demo or sd15; may be repeated.", metavar="NAME")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the tables.")] = Path("benchmarks"),
    budgets: Annotated[int, typer.Option(help="How many, from the least to everything resident.")] = 6,
    debug: Debug = False,
) -> None:
    """Plans against whole runs on the CPU: peak, time, and the next faster candidate (the demo model in minutes)."""
    with _measuring(debug):
        check_names("--model", model or (), ("demo", "sd15"))
        check_count("--budgets", budgets, _MOST_BUDGETS)
        from ..bench.end_to_end import run

        print(f"written: {run(tuple(model or ('demo', 'sd15')), out, budgets)}")


@bench.command()
def attention(as_json: Json = False, debug: Debug = False) -> None:
    """Every attention backend: error against float64, peak, time."""
    with guarded(debug):
        from ..bench.attention import run

        run(json=as_json)


@bench.command()
def plans(
    model: Models = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The least memory that lossless settings need, size by size."""
    with _measuring(debug, not as_json):
        check_names("--model", model or (), NAMES)
        from ..bench.plans import lines, run
        from ..bench.report import show

        rows = run(out, only=tuple(model or ()))
        show(rows, lines(rows), as_json)


@bench.command()
def schedule(
    model: Models = None,
    card: Annotated[
        list[str] | None, typer.Option("--gpu", help="A card, such as rtx2070; may be repeated.", metavar="NAME")
    ] = None,
    width: Side = None,
    height: Side = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How much slower a step is with a part of the weights on the device, by schedule and by simpler policies."""
    with _measuring(debug, not as_json):
        check_names("--model", model or (), NAMES)
        check_side("width", width)
        check_side("height", height)
        from ..bench.schedule import run

        run(as_json, tuple(model or ("sd15", "sdxl")), tuple(card or ("rtx2070",)), width, height, out)


@bench.command()
def storage(as_json: Json = False, debug: Debug = False) -> None:
    """Weights in 8 bits: how far they take the demo model's pictures, and its layers, off."""
    with _measuring(debug, not as_json):
        from ..bench.storage import run

        run(json=as_json)


@bench.command()
def gpu(
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="correctness, attention, workspaces, peaks, streaming or max-size; may be repeated. Left out: all.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for GPU.json and GPU.md.")] = Path("benchmarks/results"),
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is there already.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """On an NVIDIA GPU: races, predicted and measured peaks, streamed weights, largest pictures, attention."""
    with _measuring(debug, not as_json):
        from ..bench.gpu import PARTS, run, unmeasured

        written = run(tuple(part or PARTS), out, again=again)
        lacking = unmeasured(written)
        typer.echo(written.with_suffix(".json").read_text(encoding="utf-8") if as_json else f"written: {written}")
        if lacking:
            typer.echo(f"no time was left for {lacking} rows: the same command goes on with them", err=True)
