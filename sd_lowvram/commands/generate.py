"""``sd-lowvram generate``: the options, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoints.schedulers import SCHEDULERS
from .guard import guarded
from .inputs import DEMO_GUIDANCE, USUAL_GUIDANCE, Job, check_job
from .knobs import with_knobs
from .values import MOST_STEPS, checked_settings

_PICTURE, _MEMORY, _RUN = "Picture", "Memory", "Run"
_NAMES = ", ".join(SCHEDULERS)


def _option(*names: str, text: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


@with_knobs
def generate(
    prompt: Annotated[str, typer.Argument(help="What the picture shows.")],
    model: Annotated[
        str | None,
        _option("--model", "-m", text="Diffusers folder or .safetensors file (SD1.x, SD2.x, SDXL); left out: the demo "
                "model.", panel=_PICTURE, metavar="PATH"),
    ] = None,
    output: Annotated[
        str | None,
        _option("--output", "-o", text="PNG file, overwritten if there; or a folder. Left out: a new name in outputs/.",
                panel=_PICTURE, metavar="PATH"),
    ] = None,
    negative: Annotated[str, _option("--negative", text="What it does not show.", panel=_PICTURE)] = "",
    width: Annotated[int | None, _option("--width", text="Left out: the model's own.", panel=_PICTURE)] = None,
    height: Annotated[int | None, _option("--height", text="Left out: the model's own.", panel=_PICTURE)] = None,
    steps: Annotated[int, _option("--steps", text=f"Denoising steps, up to {MOST_STEPS}.", panel=_PICTURE)] = 30,
    seed: Annotated[
        int | None,
        _option("--seed", text="Same seed, same picture, on every device; pictures of a batch count on from it. "
                "Left out: random.", panel=_PICTURE),
    ] = None,
    guidance: Annotated[
        float | None,
        _option("--guidance", text=f"How strictly to follow the prompt; left out: {USUAL_GUIDANCE} (demo model: "
                f"{DEMO_GUIDANCE}).", panel=_PICTURE),
    ] = None,
    scheduler: Annotated[
        str | None,
        _option("--scheduler", text=f"Left out: the model's own. One of {_NAMES}.", panel=_PICTURE, metavar="NAME"),
    ] = None,
    batch: Annotated[int, _option("--batch", text="Pictures at a time.", panel=_PICTURE)] = 1,
    init_image: Annotated[
        Path | None,
        _option("--init-image", text="Picture to start from; its size is kept unless --width or --height is given.",
                panel=_PICTURE, metavar="FILE"),
    ] = None,
    strength: Annotated[
        float | None,
        _option("--strength", text="How much of it changes, up to 1; left out: 0.75, with a mask 1.", panel=_PICTURE),
    ] = None,
    mask: Annotated[
        Path | None,
        _option("--mask", text="Paint only where this picture is white.", panel=_PICTURE, metavar="FILE"),
    ] = None,
    prediction: Annotated[
        str | None,
        _option("--prediction", text="What a single file of SD2.x predicts, epsilon or v_prediction; left out: "
                "guessed from its weights.", panel=_PICTURE),
    ] = None,
    vram: Annotated[
        str | None,
        _option("--vram", text='Budget on the device, "4GB"; left out: what is free.', panel=_MEMORY, metavar="SIZE"),
    ] = None,
    ram: Annotated[
        str | None,
        _option("--ram", text="Budget in host memory; left out: what is free.", panel=_MEMORY, metavar="SIZE"),
    ] = None,
    approximate: Annotated[
        bool, _option("--approximate", text="Allow settings that change the picture.", panel=_MEMORY)
    ] = False,
    memory_plot: Annotated[
        Path | None,
        _option("--memory-plot", text="Draw the memory of each stage, planned and measured, into this PNG file; on a "
                "CPU this slows small models a little.", panel=_MEMORY, metavar="FILE"),
    ] = None,
    device: Annotated[
        str | None, _option("--device", text="cuda, cuda:1, cpu, ...; left out: a GPU if there is one.", panel=_RUN)
    ] = None,
    allow_pickle: Annotated[
        bool, _option("--allow-pickle", text="Load a .ckpt whose source you trust.", panel=_RUN)
    ] = False,
    as_json: Annotated[bool, _option("--json", text="Print one JSON object and nothing else.", panel=_RUN)] = False,
    quiet: Annotated[bool, _option("--quiet", "-q", text="Print only the files' names.", panel=_RUN)] = False,
    debug: Annotated[bool, _option("--debug", text="Show the traceback of an error.", panel=_RUN)] = False,
    settings: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Make a picture from a prompt, within the memory that you state."""
    with guarded(debug):
        job = check_job(Job(
            prompt=prompt, negative=negative, model=model, output=output, width=width, height=height, steps=steps,
            seed=seed, guidance=guidance, scheduler=scheduler, batch=batch, init_image=init_image, strength=strength,
            mask=mask, prediction=prediction, vram=vram, ram=ram, approximate=approximate, device=device,
            allow_pickle=allow_pickle, settings=checked_settings(settings or {}),
            memory_plot=memory_plot,
        ))  # fmt: skip
        from rich.console import Console

        from .paint import paint

        _print_result(paint(job, Console(stderr=True, quiet=quiet or as_json)), as_json, quiet)


def _print_result(result: dict[str, Any], as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for file in result["files"]:
        print(file)
    if not quiet:
        seconds = result["seconds"]
        print(f"loaded in {seconds['load']:.1f} s, made in {seconds['run']:.1f} s")
