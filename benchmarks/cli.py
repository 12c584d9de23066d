"""``python -m benchmarks``: measurements, each in pairs within one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sd_lowvram.checkpoints.architectures import NAMES
from sd_lowvram.commands.guard import guarded
from sd_lowvram.commands.one_line import OneLine
from sd_lowvram.commands.values import check_count, check_given, check_names, check_run, check_side
from sd_lowvram.errors import BadInputError
from sd_lowvram.plots.style import check_plots
from sd_lowvram.policies.named import help_text

from .commands.options import Debug, Json, Out, measuring
from .commands.policies import cards, fit, max_size, peers, same, steps, variance, warmup
from .commands.report import report
from .commands.speed import fastest, ladder
from .commands.students import students

_MOST_BUDGETS = 100
app = typer.Typer(
    name="benchmarks",
    cls=OneLine,
    help="Measure: both sides in one process in turn, ratio of medians.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for one in (warmup, variance, steps, fit, same, max_size, cards, peers, ladder, fastest, students, report):
    app.command()(one)

Models = Annotated[
    list[str] | None, typer.Option("--model", "-m", help="sd15, sd21 or sdxl; may be repeated.", metavar="NAME")
]
Side = Annotated[int | None, typer.Option(help="Left out: sizes that are usual for the model.")]


@app.command()
def vae(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose autoencoder: sd15, sdxl, flux or flux2.", metavar="NAME")
    ] = "sd15",
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Exact tiles beside the plain decode: time, peak, and how far every way is from it."""
    with measuring(debug, not as_json):
        from .vae import run

        run(json=as_json, model=model, out=out)


@app.command()
def end_to_end(
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help="demo or sd15; may be repeated.", metavar="NAME")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the tables.")] = Path("benchmarks"),
    budgets: Annotated[int, typer.Option(help="How many, from the least to everything resident.")] = 6,
    debug: Debug = False,
) -> None:
    """Plans against whole runs on the CPU: peak, time, and the next faster candidate (the demo model in minutes)."""
    with measuring(debug):
        check_names("--model", model or (), ("demo", "sd15"))
        check_count("--budgets", budgets, _MOST_BUDGETS)
        from .end_to_end import run

        print(f"written: {run(tuple(model or ('demo', 'sd15')), out, budgets)}")


@app.command()
def attention(as_json: Json = False, debug: Debug = False) -> None:
    """Every attention backend: error against float64, peak, time."""
    with guarded(debug):
        from .attention import run

        run(json=as_json)


@app.command()
def plans(
    model: Models = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The least memory that lossless settings need, size by size."""
    with measuring(debug, not as_json):
        check_names("--model", model or (), NAMES)
        from .plans import lines, run
        from .tables import show

        report = run(out, only=tuple(model or ()))
        show(report["rows"], lines(report), as_json)


@app.command()
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
    with measuring(debug, not as_json):
        check_names("--model", model or (), NAMES)
        check_side("width", width)
        check_side("height", height)
        from .schedule import run

        run(as_json, tuple(model or ("sd15", "sdxl")), tuple(card or ("rtx2070",)), width, height, out)


@app.command()
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
    steps: Annotated[int, typer.Option(help="Denoising steps of a picture.")] = 20,
    policy: Annotated[str, typer.Option(help=help_text(), metavar="NAME")] = "ours",
    first: Annotated[int, typer.Option("--from", help="The shortest side, in pixels.")] = 256,
    last: Annotated[int, typer.Option("--to", help="The longest side.")] = 1024,
    step: Annotated[int, typer.Option("--step", help="From one side to the next.")] = 64,
    out: Annotated[Path, typer.Option("--out", help="Folder of table, heat map and JSON.")] = Path("matrix"),
    again: Annotated[bool, typer.Option("--again", help="Forget what is there already.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Seconds of a picture by height and width, sizes that do not fit left grey; goes on where it ended."""
    with measuring(debug, not as_json):
        check_given(model=model, gpu=card)
        check_run(last, first, steps, 1, vram, None)
        check_side("step", step)
        if first > last:
            raise BadInputError(f"--from {first} is beyond --to {last}")
        check_plots()
        from .matrix import lines, run
        from .tables import show

        found = run(
            model, range(first, last + 1, step), gpu=card, vram=vram, steps=steps, policy=policy, out=out, again=again
        )
        show(found, lines(found), as_json)


@app.command()
def published(out: Out = None, as_json: Json = False, debug: Debug = False) -> None:
    """Times foretold for an RTX 2070 by three policies beside the 169 published ones of each."""
    with measuring(debug, not as_json):
        from .published import lines, run
        from .tables import show

        report = run(out=out)
        show(report, lines(report), as_json)


@app.command()
def batches(
    on: Annotated[str, typer.Option("--on", help="local or ray.", metavar="WHERE")] = "local",
    workers: Annotated[int, typer.Option(help="How many beside one; on a machine with cards at most as many.")] = 2,
    jobs: Annotated[int, typer.Option(help="Pictures for each worker.")] = 16,
    pairs: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pictures a minute by several workers beside one, in pairs."""
    with measuring(debug, not as_json):
        check_names("--on", [on], ("local", "ray"))
        for name, count, least in (("--workers", workers, 2), ("--jobs", jobs, 4), ("--pairs", pairs, 1)):
            check_count(name, count, 1000, least)
        from .batches import run

        run(on, workers, jobs, pairs, as_json)


@app.command()
def winograd(out: Out = None, as_json: Json = False, debug: Debug = False) -> None:
    """Winograd's convolutions: what they save, their error, their time here; writes OUT and, beside it, JSON."""
    with measuring(debug, not as_json):
        from .tables import show
        from .winograd import lines, run

        report = run(out)
        show(report, lines(report), as_json)


@app.command()
def finite(out: Out = None, as_json: Json = False, debug: Debug = False) -> None:
    """What it costs to look whether decoded values are numbers; writes OUT and, beside it, JSON."""
    with measuring(debug, not as_json):
        from .finite import lines, run
        from .tables import show

        report = run(out)
        show(report, lines(report), as_json)


@app.command("smaller-unets")
def smaller_unets(
    student: Annotated[
        list[str] | None,
        typer.Option(
            "--student", help="Base, Small, Tiny, M1, M2 or M3; may be repeated. Left out: all.", metavar="NAME"
        ),
    ] = None,
    size: Annotated[int, typer.Option(help="Of the picture whose passes are timed.")] = 512,
    pairs: Annotated[int, typer.Option(help="Passes of each side.")] = 5,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """SD1.5's UNet with layers cut out: parameters, operations, activations, and passes beside the whole one's here."""
    with measuring(debug, not as_json):
        from .smaller_unets import STUDENTS, lines, run
        from .tables import show

        check_names("--student", student or (), [*STUDENTS])
        check_side("size", size)
        check_count("--pairs", pairs, 1000)
        report = run(out, size, pairs, tuple(student or STUDENTS))
        show(report, lines(report), as_json)


@app.command()
def storage(out: Out = None, as_json: Json = False, debug: Debug = False) -> None:
    """Weights in 8 bits: how far they take the demo model's pictures, and its layers, off."""
    with measuring(debug, not as_json):
        from .storage import run

        run(json=as_json, out=out)


@app.command()
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
    with measuring(debug, not as_json):
        from .gpu import PARTS, run, unmeasured

        written = run(tuple(part or PARTS), out, again=again)
        lacking = unmeasured(written)
        typer.echo(written.with_suffix(".json").read_text(encoding="utf-8") if as_json else f"written: {written}")
        if lacking:
            typer.echo(f"no time was left for {lacking} rows: the same command goes on with them", err=True)
