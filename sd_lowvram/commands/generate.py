"""``sd-lowvram generate``: from a prompt to a PNG, within a budget."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import LowVRAMError
from ..pictures import check_writable, output_paths, parameters_text, save_picture
from ..schedulers import SCHEDULERS, label_of, set_scheduler
from ..settings import Settings
from .guard import guarded
from .inputs import Job, check_budget, check_device, check_job, open_picture
from .knobs import with_knobs

if TYPE_CHECKING:
    from rich.console import Console

DEMO_GUIDANCE, USUAL_GUIDANCE = 4.0, 7.5
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
        Path | None,
        _option("--output", "-o", text="PNG file, overwritten if there; or a folder. Left out: a new name in outputs/.",
                panel=_PICTURE, metavar="PATH"),
    ] = None,
    negative: Annotated[str, _option("--negative", text="What it does not show.", panel=_PICTURE)] = "",
    width: Annotated[int | None, _option("--width", text="Left out: the model's own.", panel=_PICTURE)] = None,
    height: Annotated[int | None, _option("--height", text="Left out: the model's own.", panel=_PICTURE)] = None,
    steps: Annotated[int, _option("--steps", text="Denoising steps.", panel=_PICTURE)] = 30,
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
        job = check_job(
            prompt, negative, width, height, steps, seed, guidance, scheduler, batch, init_image, mask, strength
        )
        budgets = check_budget("vram", vram), check_budget("ram", ram)
        from rich.console import Console

        console = Console(stderr=True, quiet=quiet or as_json)
        result = _generate(
            console, job, model, output, budgets, device, approximate, allow_pickle, prediction,
            Settings(**settings or {}),
        )  # fmt: skip
        _print_result(result, as_json, quiet)


def _generate(
    console: Console,
    job: Job,
    model: str | None,
    output: Path | None,
    budgets: tuple[int | None, int | None],
    device: str | None,
    approximate: bool,
    allow_pickle: bool,
    prediction: Any,
    settings: Settings,
) -> dict[str, Any]:
    paths = output_paths(output, job.batch, job.seed)
    images = _inputs(job)
    # A first look at the place for the output, before minutes of loading; the second knows the size.
    check_writable(paths[0], 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    started = time.perf_counter()
    with console.status("loading"):
        pipe, where = _load(model, job, check_device(device), allow_pickle, prediction)
    loaded = time.perf_counter()
    job_size = _size(pipe, job, images)
    check_writable(paths[0], job.batch * (job_size[0] * job_size[1] * 4 + (64 << 10)))
    from .. import optimize
    from .show import Bars, show_plan

    plan = optimize(
        pipe, vram=_bytes(budgets[0]), ram=_bytes(budgets[1]), width=job_size[0], height=job_size[1], batch=job.batch,
        device=where, settings=settings, approximate=approximate,
    )  # fmt: skip
    show_plan(console, plan)
    console.print(f"seed: {job.seed}", highlight=False)
    guidance = job.guidance if job.guidance is not None else DEMO_GUIDANCE if model is None else USUAL_GUIDANCE
    with Bars(console, shown=not console.quiet).running() as bars:
        pictures = _run(pipe, job, job_size, guidance, images, bars.update)
    seconds = {"load": loaded - started, "run": time.perf_counter() - loaded}
    kernel = attention_that_ran(pipe) or plan.settings.attention
    for number, (picture, path) in enumerate(zip(pictures, paths, strict=True)):
        values = _parameters(pipe, job, job_size, guidance, model, plan, kernel, job.seed + number)
        save_picture(picture, path, parameters_text(job.prompt, job.negative, values))
    return {
        "files": [str(path) for path in paths],
        "seed": job.seed,
        "width": job_size[0],
        "height": job_size[1],
        "attention": kernel,
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "plan": plan.as_dict(),
    }


def _bytes(budget: int | None) -> str | None:
    return None if budget is None else f"{budget}B"


def _load(model: str | None, job: Job, device: str | None, allow_pickle: bool, prediction: Any) -> tuple[Any, Any]:
    import torch

    from ..checkpoint import load_pipeline
    from ..device import default_device

    where = torch.device(device) if device else default_device()
    dtype = torch.float32 if where.type == "cpu" else torch.float16
    pipe: Any = load_pipeline(model, job.task, dtype, allow_pickle=allow_pickle, prediction=prediction)
    pipe.set_progress_bar_config(disable=True)
    if job.scheduler:
        set_scheduler(pipe, job.scheduler)
    return pipe, where


def _inputs(job: Job) -> dict[str, Any]:
    images = {}
    if job.init_image:
        images["image"] = open_picture(job.init_image, "--init-image")
    if job.mask:
        images["mask_image"] = open_picture(job.mask, "--mask", "L")
    return images


def _size(pipe: Any, job: Job, images: dict[str, Any]) -> tuple[int, int]:
    if "image" in images and job.width is None and job.height is None:
        width, height = (max(8, side - side % 8) for side in images["image"].size)
        return width, height
    sample = pipe.unet.config.sample_size
    sides = [sample, sample] if isinstance(sample, int) else list(sample)
    native_height, native_width = (side * pipe.vae_scale_factor for side in sides)
    return job.width or native_width, job.height or native_height


def _run(
    pipe: Any,
    job: Job,
    size: tuple[int, int],
    guidance: float,
    images: dict[str, Any],
    update: Callable[[str, int, int], None],
) -> list[Any]:
    import torch
    from PIL import Image

    def after_step(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        update("steps", step + 1, job.steps_run)
        if step + 1 >= job.steps_run and not torch.isfinite(values["latents"]).all():
            raise LowVRAMError("the model computed values beyond its number type: try --precision fp32 or bf16")
        return values

    extra: dict[str, Any] = {"strength": job.strength} if images else {"width": size[0], "height": size[1]}
    if job.mask:
        extra |= {"width": size[0], "height": size[1]}
    extra |= {name: image.resize(size, Image.Resampling.LANCZOS) for name, image in images.items()}
    # On the CPU, so that a seed means the same picture on every device.
    seeds = [torch.Generator("cpu").manual_seed((job.seed + n) % 2**64) for n in range(job.batch)]
    update("steps", 0, job.steps_run)
    result = pipe(
        prompt=[job.prompt] * job.batch, negative_prompt=[job.negative] * job.batch, generator=seeds,
        num_inference_steps=job.steps, guidance_scale=guidance, callback_on_step_end=after_step, **extra,
    )  # fmt: skip
    return list(result.images)


def attention_that_ran(pipe: Any) -> str:
    """The attention kernels that the hook saw running, "" where none was attached."""
    return ""


def _parameters(
    pipe: Any,
    job: Job,
    size: tuple[int, int],
    guidance: float,
    model: str | None,
    plan: Any,
    kernel: str | None,
    seed: int,
) -> dict[str, Any]:
    from .. import __version__
    from .show import decided

    sampler, schedule = label_of(pipe.scheduler)
    chosen = ", ".join(f"{name}={value}" for name, value in decided(plan))
    return {
        "Steps": job.steps,
        "Sampler": sampler,
        "Schedule type": schedule or None,
        "CFG scale": f"{guidance:g}",
        "Seed": seed,
        "Size": f"{size[0]}x{size[1]}",
        "Model": "sd-lowvram demo" if model is None else Path(model).stem,
        "Denoising strength": f"{job.strength:g}" if job.init_image else None,
        "RNG": "CPU",
        "Low VRAM plan": chosen or None,
        "Low VRAM attention": kernel,
        "Version": f"sd-lowvram {__version__}",
    }


def _print_result(result: dict[str, Any], as_json: bool, quiet: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    for file in result["files"]:
        print(file)
    if not quiet:
        seconds = result["seconds"]
        print(f"loaded in {seconds['load']:.1f} s, made in {seconds['run']:.1f} s")
