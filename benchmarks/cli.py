"""``python -m benchmarks``: measurements, each in pairs within one process. What ``run`` of a file is called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sd_lowvram.checkpoints.architectures import NAMES
from sd_lowvram.commands.one_line import OneLine
from sd_lowvram.commands.streams import tell
from sd_lowvram.commands.values import check_count, check_names, check_run, check_side
from sd_lowvram.errors import BadInputError
from sd_lowvram.policies import POLICIES
from sd_lowvram.units import parse_size

from .commands.options import Debug, Json, measurement, measuring

_MOST_BUDGETS = 100
_MOST_PAIRS = 1000
_TIMED = ("demo", "sd15")
_ON_CARDS = ("sd15", "sdxl")

app = typer.Typer(
    name="benchmarks",
    cls=OneLine,
    help="Measure: both sides in one process in turn, ratio of medians.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Timed = Annotated[str, typer.Option("--model", "-m", help="sd15 or demo.", metavar="NAME")]
Architectures = Annotated[
    list[str] | None, typer.Option("--model", "-m", help="sd15, sd21 or sdxl; may be repeated.", metavar="NAME")
]
Size = Annotated[int, typer.Option(help="Side of the square picture in pixels.")]
Side = Annotated[int | None, typer.Option(help="Left out: sizes that are usual for the model.")]
Cards = Annotated[
    list[str] | None, typer.Option("--gpu", help="A card, such as rtx2070; may be repeated.", metavar="NAME")
]
Pairs = Annotated[int, typer.Option(help="Calls of each side.")]


def peers(
    size: Annotated[int | None, typer.Option(help="Side of the square picture in pixels; left out: 256.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps of a picture; left out: 8.")] = None,
    card: Annotated[
        bool,
        typer.Option(
            "--card", help="On a simulated CUDA card: bytes and counts of larger models, and other packages too."
        ),
    ] = False,
) -> dict[str, Any]:
    """diffusers' own ways to save memory next to ours: seconds, peaks by the same counters, and the picture."""
    if card:
        if size or steps:
            raise BadInputError("--size and --steps are those of the table: leave them out with --card")
        return {"card": True}
    side, number = size or 256, steps or 8
    check_run(side, side, number, 1, None, None)
    return {"size": side, "steps": number}


def cards(
    card: Cards = None, model: Annotated[str, typer.Option("--model", "-m", help="sd15 or sdxl.")] = "sd15"
) -> dict[str, Any]:
    """Predict seconds and peak of a model for GPUs (left out: four), ours and plain diffusers'."""
    check_names("--model", [model], _ON_CARDS)
    return {"model": model} | ({"cards": card} if card else {})


def todays_models(
    gpu: Annotated[str, typer.Option(help="The card.", metavar="NAME")] = "rtx3060",
    vram: Annotated[str, typer.Option(help="What of it may be taken.", metavar="SIZE")] = "4GB",
    ram: Annotated[str, typer.Option(help="Host memory.", metavar="SIZE")] = "64GB",
) -> dict[str, Any]:
    """Predict memory and seconds a step of today's transformers for a GPU, at three sizes."""
    return {"card": gpu, "vram": parse_size(vram, "--vram"), "ram": parse_size(ram, "--ram")}


def todays_memory() -> dict[str, Any]:
    """Predict seconds a step of today's transformers by VRAM, RAM and disk, for two GPUs."""
    return {}


def max_size(
    policy: Annotated[
        list[str] | None, typer.Option(help="May be repeated; left out: all of them.", metavar="NAME")
    ] = None,
    card: Annotated[str, typer.Option("--gpu", help="The card.", metavar="NAME")] = "rtx2070",
) -> dict[str, Any]:
    """Predict the largest square picture of SD1.5 by each policy for a GPU, next to published ones."""
    return {"card": card, "names": tuple(policy or POLICIES)}


def ladder(
    of: Annotated[str, typer.Option("--of", help="B or E: whose ladder.", metavar="SOURCE")] = "B",
    model: Timed = "sd15",
    size: Annotated[int | None, typer.Option(help="Of the picture; left out: 512 on a GPU, 256 on a CPU.")] = None,
    pairs: Pairs = 5,
) -> dict[str, Any]:
    """A published ladder's rungs, and ours, as they are here: seconds of a guided step of SD1.5, and published ones."""
    check_names("--of", [of], ("B", "E"))
    check_names("--model", [model], _TIMED)
    check_count("--pairs", pairs, _MOST_PAIRS)
    check_side("size", size)
    return {"source": of, "model": model, "size": size, "pairs": pairs}


def vae(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Whose autoencoder: sd15, sdxl, flux, flux2 or qwen-image.", metavar="NAME"),
    ] = "sd15",
) -> dict[str, Any]:
    """Exact tiles compared with the plain decode: time, peak, and how far every way is from it."""
    return {"model": model}


def end_to_end(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="demo or sd15; may be repeated.", metavar="NAME")
    ] = None,
    budgets: Annotated[int, typer.Option(help="How many, from the least to everything resident.")] = 6,
) -> dict[str, Any]:
    """Plans against whole runs on the CPU: peak, time, and the next faster candidate (the demo model in minutes)."""
    check_names("--model", model or (), _TIMED)
    check_count("--budgets", budgets, _MOST_BUDGETS)
    return {"models": tuple(model or _TIMED), "budgets": budgets}


def plans(model: Architectures = None) -> dict[str, Any]:
    """The least memory that lossless settings need, size by size."""
    check_names("--model", model or (), NAMES)
    return {"only": tuple(model or ())}


def schedule(
    model: Architectures = None, card: Cards = None, width: Side = None, height: Side = None
) -> dict[str, Any]:
    """Simulate the slowdown of a step with a part of the weights on the device, by our schedule and simpler ones."""
    check_names("--model", model or (), NAMES)
    check_side("width", width)
    check_side("height", height)
    chosen = {"models": tuple(model or ("sd15", "sdxl")), "gpus": tuple(card or ("rtx2070",))}
    return {**chosen, "width": width, "height": height}


def published() -> dict[str, Any]:
    """Compare predicted times for an RTX 2070 with 169 published ones, for each of three policies."""
    return {}


def h100_steps() -> dict[str, Any]:
    """Predict the steps that were measured on an H100, by the card's name."""
    return {}


for _one in (
    max_size, cards, peers, ladder, vae, end_to_end, plans, schedule, published, todays_models, todays_memory,
    h100_steps,
):  # fmt: skip
    app.command()(measurement(_one))


@app.command()
def tables(
    context: typer.Context,
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Tables by their names in benchmarks/; left out: all of them.", metavar="[NAME]..."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="A table that would not be done by then keeps its date. Not for NAME.", min=0)
    ] = 60,
    out: Annotated[Path | None, typer.Option(help="Folder of the tables; left out: benchmarks/ of this clone.")] = None,
    debug: Debug = False,
) -> None:
    """Make the computed tables anew, one after the other; the same command resumes where it stopped."""
    with measuring(debug):
        from .computed import TABLES, make

        check_names("NAME", name or (), [*TABLES])
        program = context.find_root().command
        for line in make(name or (), out or Path(__file__).parent, 60 * minutes, program):
            typer.echo(line, err=True)


@app.command()
def gpu(
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="tests, calibration, workspaces, peaks, kernels, correctness, attention, streaming, todays, decodes, "
            "peers, drawn or max-size; may be repeated. Left out: all.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for GPU.json and GPU.md.")] = Path("benchmarks/results"),
    seconds: Annotated[
        float | None, typer.Option(help="For each part; left out: its own, nine minutes or less.", min=0)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is there already.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure an NVIDIA GPU: tests, then memory, kernels, races, attention, streamed weights, other programs, sizes."""
    with measuring(debug, not as_json):
        from .gpu import PARTS, failures, results_in, run, summary, unmeasured

        written = run(tuple(part or PARTS), out, again=again, seconds=seconds)
        results = results_in(written)
        lacking = unmeasured(results)
        typer.echo(json.dumps(results, indent=1) if as_json else "\n".join([*summary(results), f"written: {written}"]))
        if lacking:
            typer.echo(f"no time was left for {lacking} rows: the same command goes on with them", err=True)
        if failed := failures(results):
            tell(f"{failed} tests failed: {written} says which, and why")
            raise SystemExit(1)
