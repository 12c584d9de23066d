"""``python -m benchmarks``: measurements, each in pairs within one process. What ``run`` of a file is called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sd_lowvram import doors
from sd_lowvram.checkpoints.architectures import NAMES
from sd_lowvram.commands.one_line import OneLine
from sd_lowvram.commands.streams import tell
from sd_lowvram.commands.values import check_count, check_given, check_names, check_run, check_side
from sd_lowvram.errors import BadInputError
from sd_lowvram.plots.style import check_plots
from sd_lowvram.policies.named import HELP
from sd_lowvram.units import parse_size

from .commands.options import Debug, Json, measurement, measuring
from .commands.report import report

_MOST_BUDGETS = 100
_MOST_PAIRS = 1000
_MOST_RUNS = 10_000
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

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Folder or .safetensors file; left out: the demo model.", metavar="PATH"),
]
Timed = Annotated[str, typer.Option("--model", "-m", help="sd15 or demo.", metavar="NAME")]
Architectures = Annotated[
    list[str] | None, typer.Option("--model", "-m", help="sd15, sd21 or sdxl; may be repeated.", metavar="NAME")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="May be repeated; left out: all that run here. sd-lowvram plan --list-policies tells them.",
        metavar="NAME",
    ),
]
Size = Annotated[int, typer.Option(help="Side of the square picture in pixels.")]
Steps = Annotated[int, typer.Option(help="Denoising steps of a picture.")]
Side = Annotated[int | None, typer.Option(help="Left out: sizes that are usual for the model.")]
Cards = Annotated[
    list[str] | None, typer.Option("--gpu", help="A card, such as rtx2070; may be repeated.", metavar="NAME")
]
Pairs = Annotated[int, typer.Option(help="Calls of each side.")]


def _pictures(model: str | None, policy: list[str] | None, size: int, most: int, **more: Any) -> dict[str, Any]:
    """Arguments for pictures by policies, of at ``most`` so many steps."""
    check_given(model=model)
    check_run(size, size, most, 1, None, None)
    return {"model": model, "names": policy or (), "size": size, **more}


def warmup(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    steps: Steps = 8,
    runs: Annotated[int, typer.Option(help="Pictures after the first.")] = 5,
) -> dict[str, Any]:
    """Extra time of the first picture after loading, by part; each policy in its own process."""
    check_count("--runs", runs, _MOST_RUNS)
    return _pictures(model, policy, size, steps, steps=steps, runs=runs)


def variance(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    steps: Steps = 8,
    runs: Annotated[int, typer.Option(help="Pictures in a row after the first.")] = 30,
) -> dict[str, Any]:
    """Many equal pictures in a row: standard deviation and coefficient of variation of their times."""
    check_count("--runs", runs, _MOST_RUNS, 2)
    return _pictures(model, policy, size, steps, steps=steps, runs=runs)


def steps(
    model: Model = None,
    policy: Policies = None,
    size: Size = 128,
    last: Annotated[int, typer.Option("--to", help="The most steps; they begin with 10, by tens.")] = 100,
) -> dict[str, Any]:
    """Seconds by the number of steps: the line through them, and how well it fits."""
    check_count("--to", last, 1000, 20)
    return _pictures(model, policy, size, last, counts=range(10, last + 1, 10))


def fit(
    matrix: Annotated[
        list[Path] | None, typer.Argument(help="JSON files of matrix, beside the published ones.", metavar="FILE")
    ] = None,
) -> dict[str, Any]:
    """Second-order polynomials of the pixels against the seconds of matrices, small pictures apart."""
    return {"files": matrix or ()}


def same(model: Model = None, policy: Policies = None, size: Size = 128, steps: Steps = 8) -> dict[str, Any]:
    """Compare the pictures of all policies, each made twice: bits, and differences of 8-bit values."""
    return _pictures(model, policy, size, steps, steps=steps)


def peers(size: Size = 256, steps: Steps = 8) -> dict[str, Any]:
    """diffusers' own ways to save memory beside ours: seconds, peaks by the same counters, and the picture."""
    check_run(size, size, steps, 1, None, None)
    return {"size": size, "steps": steps}


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


def rereading() -> dict[str, Any]:
    """Bytes a step reads of a model's file that host memory does not hold, beside a loop that reads all of it anew."""
    return {}


def todays_blocks() -> dict[str, Any]:
    """Peaks of full-size blocks of today's transformers and of an autoencoder, run on the CPU, beside planned ones."""
    return {}


def half_products() -> dict[str, Any]:
    """Predict seconds a step of today's transformers with fp16 products, for GPUs without bf16; measure errors."""
    return {}


def max_size(
    model: Model = None,
    policy: Policies = None,
    card: Annotated[
        str | None, typer.Option("--gpu", help="Foretell SD1.5's for this card; left out: runs here.", metavar="NAME")
    ] = None,
    cap: Annotated[str, typer.Option("--vram", help="The cap of the runs here.", metavar="SIZE")] = "96MB",
    steps: Steps = 1,
) -> dict[str, Any]:
    """Find the largest square picture by each policy: run here under a cap, or predicted for a GPU."""
    check_given(model=model, gpu=card)
    check_run(64, 64, steps, 1, None, None)
    if card is not None and model is not None:
        raise BadInputError(f"--gpu {card} foretells SD1.5: leave out --model {model}, or --gpu")
    cap_bytes = parse_size(cap, "--vram")
    return {"model": model, "names": policy or (), "card": card, "cap": cap_bytes, "steps": steps}


def ladder(
    of: Annotated[str, typer.Option("--of", help="B or E: whose ladder.", metavar="SOURCE")] = "B",
    model: Timed = "sd15",
    size: Annotated[int | None, typer.Option(help="Of the picture; left out: 512 on a GPU, 256 on a CPU.")] = None,
    pairs: Pairs = 5,
) -> dict[str, Any]:
    """A published ladder's rungs, and ours, as they are here: seconds of a guided step of SD1.5, published beside."""
    check_names("--of", [of], ("B", "E"))
    check_names("--model", [model], _TIMED)
    check_count("--pairs", pairs, _MOST_PAIRS)
    check_side("size", size)
    return {"source": of, "model": model, "size": size, "pairs": pairs}


def fastest(
    model: Timed = "sd15",
    pairs: Pairs = 15,
    decode_pairs: Annotated[int, typer.Option("--decode-pairs", help="Decodes of each side.")] = 3,
    compiled: Annotated[bool, typer.Option("--compiled", help="What takes minutes to compile, too.")] = False,
) -> dict[str, Any]:
    """A guided step at 256x256 and a decode at 512x512 as fast as they get here, beside diffusers as it is."""
    check_names("--model", [model], _TIMED)
    check_count("--pairs", pairs, _MOST_PAIRS)
    check_count("--decode-pairs", decode_pairs, _MOST_PAIRS)
    return {"model": model, "pairs": pairs, "decode_pairs": decode_pairs, "compiled": compiled}


def vae(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Whose autoencoder: sd15, sdxl, flux, flux2 or qwen-image.", metavar="NAME"),
    ] = "sd15",
) -> dict[str, Any]:
    """Exact tiles beside the plain decode: time, peak, and how far every way is from it."""
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


def attention() -> dict[str, Any]:
    """Every attention backend: error against float64, peak, time."""
    return {}


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


def matrix(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder or file, with --gpu also sd15, sd21 or sdxl; left out: the demo model.",
            metavar="NAME|PATH",
        ),
    ] = None,
    card: Annotated[
        str | None, typer.Option("--gpu", help="Foretell for this card; left out: measured here.", metavar="NAME")
    ] = None,
    vram: Annotated[
        str | None, typer.Option("--vram", help="Budget; left out: the card's, or what is free.", metavar="SIZE")
    ] = None,
    steps: Steps = 20,
    policy: Annotated[str, typer.Option(help=HELP, metavar="NAME")] = "ours",
    first: Annotated[int, typer.Option("--from", help="The shortest side, in pixels.")] = 256,
    last: Annotated[int, typer.Option("--to", help="The longest side.")] = 1024,
    step: Annotated[int, typer.Option("--step", help="From one side to the next.")] = 64,
    out: Annotated[Path, typer.Option("--out", help="Folder of table, heat map and JSON.")] = Path("matrix"),
    again: Annotated[bool, typer.Option("--again", help="Forget what is there already.")] = False,
) -> dict[str, Any]:
    """Seconds of a picture by height and width, sizes that do not fit left grey; goes on where it ended."""
    check_given(model=model, gpu=card)
    check_run(last, first, steps, 1, vram, None)
    check_side("step", step)
    if first > last:
        raise BadInputError(f"--from {first} is beyond --to {last}")
    check_plots()
    sides = range(first, last + 1, step)
    asked = {"gpu": card, "vram": vram, "steps": steps, "policy": policy, "out": out, "again": again}
    return {"model": model, "sides": sides, **asked}


def published() -> dict[str, Any]:
    """Compare predicted times for an RTX 2070 with 169 published ones, for each of three policies."""
    return {}


def batches(
    on: Annotated[str, typer.Option("--on", help="local or ray.", metavar="WHERE")] = "local",
    workers: Annotated[int, typer.Option(help="How many beside one; on a machine with cards at most as many.")] = 2,
    jobs: Annotated[int, typer.Option(help="Pictures for each worker.")] = 16,
    pairs: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
) -> dict[str, Any]:
    """Pictures a minute by several workers beside one, in pairs."""
    check_names("--on", [on], ("local", "ray"))
    for name, count, least in (("--workers", workers, 2), ("--jobs", jobs, 4), ("--pairs", pairs, 1)):
        check_count(name, count, _MOST_PAIRS, least)
    return {"where": on, "workers": workers, "jobs": jobs, "pairs": pairs}


def ladder_on_card() -> dict[str, Any]:
    """Predict the ladders of both sources on their GPUs; nothing runs."""
    return {}


def first_steps(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="sd15 or demo; may be repeated.", metavar="NAME")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Processes of each kind.")] = 3,
) -> dict[str, Any]:
    """First steps of a process with a traced UNet: with nothing kept, another size's trace, and its own."""
    check_names("--model", model or (), _TIMED)
    check_count("--rounds", rounds, _MOST_PAIRS)
    return {"models": model or _TIMED, "rounds": rounds}


def phones() -> dict[str, Any]:
    """Compare SD1.5's weights and intermediates with those published for phones, and GELU's reads and writes."""
    return {}


def winograd() -> dict[str, Any]:
    """Winograd's convolutions: what they save, their error, their time here."""
    return {}


def finite() -> dict[str, Any]:
    """Measure the cost of checking decoded values for NaN."""
    return {}


def smaller_unets(
    student: Annotated[
        list[str] | None,
        typer.Option(
            "--student", help="Base, Small, Tiny, M1, M2 or M3; may be repeated. Left out: all.", metavar="NAME"
        ),
    ] = None,
    size: Annotated[int, typer.Option(help="Of the picture whose passes are timed.")] = 512,
    pairs: Annotated[int, typer.Option(help="Passes of each side.")] = 5,
) -> dict[str, Any]:
    """SD1.5's UNet with layers cut out: parameters, operations, activations, and passes beside the whole one's here."""
    from .smaller_unets import STUDENTS

    check_names("--student", student or (), [*STUDENTS])
    check_side("size", size)
    check_count("--pairs", pairs, _MOST_PAIRS)
    return {"side": size, "pairs": pairs, "students": tuple(student or STUDENTS)}


def storage() -> dict[str, Any]:
    """Weights in 8 bits: how far they take the demo model's pictures, and its layers, off."""
    return {}


_OF_COMMANDS: dict[str, list[Any]] = {"batch": [batches], "unet": [smaller_unets]}
"""Measurements of what the package may come without, by its command there."""

doors.find()
for _one in (
    warmup, variance, steps, fit, same, max_size, cards, peers, ladder, fastest, vae, end_to_end, attention, plans,
    schedule, matrix, published, winograd, finite, ladder_on_card, first_steps, phones,
    storage, todays_models, todays_memory, todays_blocks, rereading, half_products,
    *(_one for _name, _ones in _OF_COMMANDS.items() if _name in doors.COMMANDS for _one in _ones),
):  # fmt: skip
    app.command()(measurement(_one))
app.command()(report)


@app.command()
def gpu(
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="tests, calibration, workspaces, peaks, kernels, correctness, attention, streaming or max-size; may "
            "be repeated. Left out: all.",
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
    """Measure an NVIDIA GPU: tests, then peaks, kernels, races, attention, streamed weights, largest pictures."""
    with measuring(debug, not as_json):
        from .gpu import PARTS, failures, results_in, run, summary, unmeasured

        written = run(tuple(part or PARTS), out, again=again, seconds=seconds)
        results = results_in(written)
        lacking = unmeasured(results)
        typer.echo(json.dumps(results, indent=1) if as_json else "\n".join([*summary(results), f"written: {written}"]))
        if lacking:
            typer.echo(f"no time was left for {lacking} rows: the same command goes on with them", err=True)
        if failed := failures(results):
            tell(f"{failed} tests failed: {written} tells which, and why")
            raise SystemExit(1)
