"""``sd-lowvram unet``: look into a UNet, cut layers out of it, put two together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...commands.exit_codes import exit_on_error
from ...commands.values import check_given, check_side
from ...errors import BadInputError, OutputError
from ...units import format_size

if TYPE_CHECKING:
    from ..analysis import Taken
    from ..changes import BlockChanges
    from ..cuts import Cut

unet = typer.Typer(
    help="Cut, train and compare smaller UNets. They draw other pictures than the whole model.", no_args_is_help=True
)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Diffusers folder or .safetensors file, with --dry-run also sd15, sd21 or sdxl; "
                 "left out: the demo model.", metavar="PATH"),
]  # fmt: skip
Side = Annotated[
    int | None, typer.Option(help="Of the picture, in pixels; left out: the size that the model was trained at.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="A new folder for the whole pipeline, or a new .safetensors file (SD1.x, SD2.x).",
                 metavar="PATH"),
]  # fmt: skip
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only count layers and bytes: no weights are loaded, nothing is written.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@unet.command()
def analyse(
    model: Model = None,
    width: Side = None,
    height: Side = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Predict the times for this GPU, such as rtx2070; left out: measure them on this CPU (float32)."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the table as a chart into this PNG file.", metavar="FILE")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each part of a UNet takes in a guided step: weights, operations, time, memory of activations."""
    with exit_on_error(debug):
        check_given(model=model, gpu=gpu)
        rates = _rates(gpu)  # before torch is imported

        from rich.console import Console
        from torch import nn

        from ...commands.show import Bars
        from ..analysis import totals

        _check_sides(width, height)
        _check_plot(plot)
        if dry_run and gpu is None:
            raise BadInputError("--dry-run measures no times: name a GPU with --gpu, rtx2070 for example")
        console = Console(stderr=True)
        loaded = empty_unet(model) if rates else nn.Module.float(_load(model, console).unet)  # as a CPU runs it
        with Bars(console, not as_json).running():
            taken = _measure_units(loaded, width, height, rates)
        if plot is not None:
            from ...files import write_whole
            from ..analysis_plot import analysis_png

            write_whole(analysis_png(taken, _title(model), "predicted" if rates else "measured"), plot)
        report = {"units": [asdict(unit) for unit in taken], **totals(taken), "seconds": _seconds(taken)}
        _tell(report, _lines(taken), as_json)


@unet.command()
def prune(
    model: Model = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="base: one layer less in every block; small: base without middle block; tiny: small without "
            "innermost blocks."
        ),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(help="A block or a layer to cut: mid, dn3, dn0.1, up3.1; may be repeated.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A layer to keep; the rest is cut. May be repeated.")] = None,
    experts: Annotated[
        int,
        typer.Option(
            help="Experts in place of each 3x3 convolution of the outermost blocks; each picture mixes them. 1: none."
        ),
    ] = 1,
    regions: Annotated[
        int | None,
        typer.Option(help="Side in tokens of the regions of self-attention in these blocks; left out: the whole map."),
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option(
            help="A block that gets --experts and --regions: dn0 or up3; may be repeated. Left out: the outermost."
        ),
    ] = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Cut layers out of a model's UNet; the others keep their weights. Stock diffusers loads the result, unless it has
    experts or regions."""
    with exit_on_error(debug):
        check_given(model=model, kind=kind)
        changes = _changes(experts, regions, changed or ())
        if sum(map(bool, (kind, drop, keep))) > 1 or not (kind or drop or keep or changes):
            raise BadInputError("name one cut: --kind base, small or tiny, or what to --drop, or what to --keep")
        checked = _check_out(out, dry_run)
        empty = empty_unet(model)
        cut = _cut(empty, kind, drop or (), keep or ())
        from ..analysis import count_costs
        from ..prune import prune_unet

        smaller = prune_unet(empty, cut, changes)
        _check_changeable(empty, changes, model)
        check_layout(out, model, smaller)
        before, after = count_costs(empty), count_costs(smaller)
        if not dry_run:
            from rich.console import Console

            from ..checkpoints.save import save_pipeline

            pipe = _load(model, Console(stderr=True))
            pipe.register_modules(unet=prune_unet(pipe.unet, cut, changes))
            save_pipeline(pipe, checked)
        _tell_cut(before, after, None if dry_run else out, as_json)


@unet.command()
def combine(
    compressed: Annotated[
        str, typer.Option(help="The smaller model, whose outermost blocks are taken.", metavar="PATH")
    ],
    model: Model = None,
    blocks: Annotated[
        int, typer.Option(help="Outermost blocks taken on each side of the UNet: 1 gives M1 of A-SDM, 2 M2, 3 M3.")
    ] = 2,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Join the outermost blocks of a smaller UNet with the inner blocks of --model."""
    with exit_on_error(debug):
        check_given(model=model, compressed=compressed)
        if model == compressed:
            raise BadInputError(f"--compressed and --model are both {model}: nothing would be put together")
        checked = _check_out(out, dry_run)
        from ..analysis import count_costs
        from ..combine import combine_unets

        empty = empty_unet(model)
        combined_unet = combine_unets(empty_unet(compressed), empty, blocks)
        check_layout(out, model, combined_unet)
        before, after = count_costs(empty), count_costs(combined_unet)
        if not dry_run:
            from rich.console import Console

            from ..checkpoints.save import save_pipeline

            console = Console(stderr=True)
            pipe, other = _load(model, console), _load(compressed, console)
            pipe.register_modules(unet=combine_unets(other.unet, pipe.unet, blocks))
            save_pipeline(pipe, checked)
        _tell_cut(before, after, None if dry_run else out, as_json)


def _check_sides(width: int | None, height: int | None) -> None:
    check_side("width", width)
    check_side("height", height)


def _check_out(out: Path | None, dry_run: bool) -> Path:
    """The folder or file to write to, which must be new; asked before anything is loaded."""
    if out is None:
        if dry_run:
            return Path()
        raise BadInputError("--out is missing: name a new folder for the model, or look first with --dry-run")
    from ..checkpoints.save import check_new

    check_new(out, "--out")
    return out


def check_layout(out: Path | None, model: str | None, unet: Any) -> None:
    """Raise BadInputError where ``out`` is a single file that cannot hold ``model`` with the UNet ``unet``."""
    from ..checkpoints.save import is_single_file

    if out is not None and is_single_file(out):
        import torch

        from ...checkpoints.meta_model import meta_components
        from ..checkpoints.save_single_file import check_single_file

        check_single_file({**meta_components(model, torch.float16, ("vae", "text_encoder")), "unet": unet})


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from ...commands.pictures import check_writable
        from ...plots.style import check_plots

        check_plots()
        if plot.suffix.lower() != ".png":
            raise OutputError(f"--plot {plot} must end in .png")
        check_writable(plot, 1 << 20)


def _rates(gpu: str | None) -> Any:
    from ...devices.performance import profile

    return None if gpu is None else profile(gpu)


def empty_unet(model: str | None) -> Any:
    """The UNet of a model without weights.

    Raises:
        CheckpointError: missing, damaged, or of an unknown kind.
    """
    import torch

    from ...checkpoints.meta_model import meta_anatomy

    return meta_anatomy(model, torch.float16, only=("unet",)).denoiser_module


def _load(model: str | None, console: Any) -> Any:
    """The pipeline with its weights, in the type in which they are stored."""
    from ...checkpoints.architectures import NAMES
    from ..checkpoints.load_stored import load_as_stored

    if model in NAMES:
        raise BadInputError(f"{model} is an architecture without weights: give a model's folder or file, or --dry-run")
    from ...commands.show import loading

    with loading(console, model):
        return load_as_stored(model)


def _changes(experts: int, regions: int | None, blocks: Sequence[str]) -> BlockChanges | None:
    """Changes to the remaining blocks; None if there are none."""
    if experts < 1:
        raise BadInputError(f"--experts {experts} leaves no convolution: 1 is the plain one, 2 and more are mixed")
    if regions is not None and regions < 1:
        raise BadInputError(f"--regions {regions} is not a side of a region: give its tokens, 16 or 32 for example")
    if experts == 1 and regions is None:
        if blocks:
            raise BadInputError("--changed names blocks, and nothing is to change there: give --experts or --regions")
        return None
    from ..changes import BlockChanges

    return BlockChanges(experts, regions, tuple(blocks))


def _check_changeable(empty: Any, changes: BlockChanges | None, model: str | None) -> None:
    """Refuse experts and regions in a UNet of one layer a block: they replace layers that are cut next to them."""
    from ...checkpoints.architectures import layers_per_block

    if changes and max(layers_per_block(empty.config)) < 2:
        asked = f"--experts {changes.experts}" if changes.experts > 1 else f"--regions {changes.regions}"
        whole = "a model with two layers a block" if model is None else "the model that it was cut from"
        raise BadInputError(
            f"{asked} stands in for layers that are cut, and {'the demo model' if model is None else 'this UNet'} has "
            f"one layer a block, of which none can be: cut and change {whole} at once, with --model PATH --kind base "
            f"{asked}"
        )


def _cut(empty: Any, kind: str | None, drop: Any, keep: Any) -> Cut:
    from ..cuts import whole
    from ..prune import cut_by_names, cut_of_kind

    if not (kind or drop or keep):
        return whole(empty.config)
    return cut_of_kind(empty.config, kind) if kind is not None else cut_by_names(empty.config, keep, drop)


def _measure_units(unet: Any, width: int | None, height: int | None, rates: Any) -> list[Taken]:
    from ..analysis import analyse_unet
    from ..layers import own_side

    own = own_side(unet)
    return analyse_unet(unet, width or own, height or own, rates=rates)


def _seconds(taken: list[Taken]) -> float:
    return sum(unit.seconds for unit in taken)


def _tell(values: dict[str, Any], lines: list[str], as_json: bool) -> None:
    print(json.dumps(values, indent=2) if as_json else "\n".join(lines))


def _lines(taken: list[Taken]) -> list[str]:
    """A table of units, and of blocks."""
    from ..analysis import sum_blocks, totals

    operations, seconds = totals(taken)["operations"], _seconds(taken)
    rows = [("unit", "parameters", "operations", "of them", "time", "of it", "activations")]
    for unit in [*taken, *sum_blocks(taken)[:-1]]:
        shares = (unit.operations / operations, unit.seconds / seconds)
        amounts = f"{unit.parameters / 1e6:.1f} M", f"{unit.operations / 1e9:.1f} G", f"{shares[0]:.1%}"
        times = f"{1e3 * unit.seconds:.1f} ms", f"{shares[1]:.1%}"
        rows.append((unit.name, *amounts, *times, format_size(unit.peak_bytes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [*aligned[: len(taken) + 1], "", aligned[0].replace("unit ", "block", 1), *aligned[len(taken) + 1 :]]


def _tell_cut(before: dict[str, Any], after: dict[str, Any], written: Path | None, as_json: bool) -> None:
    values = {"out": None if written is None else str(written), **after, "before": before}
    _tell(values, _compare(before, after, written), as_json)


def _compare(was: dict[str, Any], now: dict[str, Any], out: Path | None) -> list[str]:
    lines = [
        f"parameters  {now['parameters'] / 1e6:.1f} M of {was['parameters'] / 1e6:.1f} M",
        f"operations  {now['operations'] / was['operations']:.3f} of the whole model's",
        f"activations {format_size(now['peak_bytes'])} of {format_size(was['peak_bytes'])}",
    ]
    return [*lines, f"written: {out}"] if out is not None else lines


def _title(model: str | None) -> str:
    return Path(model).stem if model else "demo model"
