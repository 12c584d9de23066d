"""``sd-lowvram plan``: what a picture would take, before anything runs and without a model's weights."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from ..settings import Settings
from .guard import guarded
from .knobs import with_knobs
from .show import decided


@with_knobs
def plan(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="sd15, sd21, sdxl, a diffusers folder or a .safetensors file; left out: "
                     "the demo model.", metavar="NAME|PATH"),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Left out: the model's own.")] = None,
    height: Annotated[int | None, typer.Option(help="Left out: the model's own.")] = None,
    batch: Annotated[int, typer.Option(help="Pictures at a time.")] = 1,
    steps: Annotated[int, typer.Option(help="Denoising steps, for the time.")] = 30,
    guidance: Annotated[bool, typer.Option(help="Whether guidance doubles the batch.")] = True,
    vram: Annotated[
        str | None,
        typer.Option(help='Budget, "4GB"; left out: the card named by --gpu, else what is free.', metavar="SIZE"),
    ] = None,
    ram: Annotated[
        str | None, typer.Option(help="Budget in host memory; left out: what is free.", metavar="SIZE")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for another card, such as rtx2070 or gtx1650.")] = None,
    approximate: Annotated[bool, typer.Option("--approximate", help="Allow settings that change the picture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Tell the peak, the time and the settings of a run, or the smallest budget that would do."""
    with guarded(debug):
        from rich.console import Console

        asked = {"width": width, "height": height, "batch": batch, "steps": steps, "guidance": guidance}
        with Console(stderr=True, quiet=as_json).status("planning"):
            made, plenty = _plans(model, asked, vram, ram, gpu, Settings(**settings or {}), approximate)
        if as_json:
            print(json.dumps(made.as_dict(), indent=2))
        else:
            _show(Console(), made, plenty)


def _plans(
    model: str | None,
    asked: dict[str, Any],
    vram: str | None,
    ram: str | None,
    gpu: str | None,
    settings: Settings,
    approximate: bool,
) -> tuple[Any, Any]:
    """The plan that was asked for, and the one with all the memory that it could want."""
    import torch

    from ..blueprint import blueprint
    from ..device import available_ram, default_device, free_vram
    from ..planner import Request, check_size, make_plan
    from ..rates import profile, rates_of
    from ..sizes import parse_size
    from ..stages import native_size, scale_factor

    device = torch.device("cuda") if gpu else default_device()
    rates = profile(gpu) if gpu else rates_of(device)
    anatomy = blueprint(model, torch.float32 if device.type == "cpu" else torch.float16)
    native = native_size(anatomy)
    sides = {side: native if asked[side] is None else asked[side] for side in ("width", "height")}
    check_size(**sides, batch=asked["batch"], factor=scale_factor(anatomy))
    budget = parse_size(vram, "vram") if vram is not None else rates.vram_bytes if gpu else free_vram(device)
    host = parse_size(ram, "ram") if ram is not None else available_ram()
    request = Request(**{**asked, **sides}, vram=budget, ram=host, device=device, rates=rates)
    made = make_plan(anatomy, request, settings, approximate)
    return made, make_plan(anatomy, dataclasses.replace(request, vram=1 << 50), settings, approximate)


def _show(console: Any, made: Any, plenty: Any) -> None:
    from rich.table import Table

    from ..sizes import format_size

    request, predicted = made.request, made.predicted
    title = f"{request.width}x{request.height}, batch {request.batch}, {request.steps} steps on {request.rates.title}"
    table = Table("stage", "peak", "weights", "activations", "in host memory", "time", "how", title=title)
    for stage in made.stages:
        sizes = (stage.peak_bytes, stage.weights_bytes, stage.activation_bytes, stage.host_bytes)
        how = ", ".join(f"{name} {value}" for name, value in stage.choice.items() if value not in (False, "off"))
        table.add_row(stage.name, *map(format_size, sizes), f"{stage.seconds:.2f} s", how or "plain")
    console.print(table)
    console.print("settings: " + ", ".join(f"{name} {value}" for name, value in decided(made)), highlight=False)
    overhead = f" + {format_size(predicted.overhead_bytes)} for the driver" if predicted.overhead_bytes else ""
    peak = f"peak {format_size(predicted.peak_bytes)}{overhead} of {format_size(request.vram)}"
    console.print(f"{peak}, {predicted.seconds:.1f} s, {made.fidelity}", highlight=False)
    console.print(
        f"the smallest budget that works is {format_size(made.minimum_vram_bytes)}, with "
        f"{format_size(made.minimum_ram_bytes)} in host memory",
        highlight=False,
    )
    if plenty.predicted.seconds < 0.99 * predicted.seconds:
        needed = plenty.predicted.peak_bytes + plenty.predicted.overhead_bytes
        console.print(f"with {format_size(needed)} it would take {plenty.predicted.seconds:.1f} s", highlight=False)
    console.print(f"rates: {request.rates.source}", style="dim", highlight=False)
