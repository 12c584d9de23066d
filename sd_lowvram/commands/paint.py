"""The work of ``generate``: load, plan, run, save; every check comes before the time that it could waste."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.inspection import PICKLES, check_model, configuration, model_path
from ..checkpoints.load import load_pipeline
from ..checkpoints.schedulers import label_of, set_scheduler
from ..demo.things import unknown_words
from ..errors import BadInputError, LowVRAMError
from .early import check_floor, known_budget
from .inputs import DEMO_GUIDANCE, USUAL_GUIDANCE, Job
from .interrupts import heed_interrupts
from .memory_plot import check_plot, draw, measured_run
from .noise import drawn_in_float32
from .pictures import check_writable, output_paths, parameters_text, save_picture
from .streams import note
from .values import LARGEST_SIDE, check_device, open_picture

if TYPE_CHECKING:
    import torch
    from rich.console import Console

_NAMED = 8
"""More unknown words than these are not named."""

_WIDE = ("fp32", "tf32", "autocast-fp16", "autocast-bf16")


def paint(job: Job, console: Console) -> dict[str, Any]:
    """Make and save the pictures of a checked ``job``; plain values for ``--json``. Progress goes to ``console``.

    Raises:
        LowVRAMError: with the exit code that the command line gives.
    """
    files = output_paths(job.output, job.batch, job.seed or 0)
    _note_unknown_words(job)
    images = _start_pictures(job)
    # A first look at the output's place, before the model is loaded; the second knows the size.
    check_writable(files[0], 1)
    check_plot(job.memory_plot)
    path = _checked_model(job, images)
    started = time.perf_counter()
    with console.status("loading"):
        pipe, device = _load(job, path)
    heed_interrupts()
    loaded = time.perf_counter()
    job = _sized(job, pipe, images)
    check_writable(files[0], job.batch * ((job.width or 0) * (job.height or 0) * 4 + (64 << 10)))
    plan = _optimize(job, pipe, device, console)
    planned = time.perf_counter()
    pictures, run = measured_run(job, pipe, plan, lambda: _run(job, pipe, images, console))
    plan = _attached(pipe)  # a leaner one, where the device ran out of memory
    values = _parameters(job, pipe, plan)
    for number, (picture, file) in enumerate(zip(pictures, files, strict=True)):
        values["Seed"] = (job.seed or 0) + number
        save_picture(picture, file, parameters_text(job.prompt, job.negative, values))
    seconds = {"load": loaded - started, "plan": planned - loaded, "run": time.perf_counter() - planned}
    if job.memory_plot and run:
        draw(job.memory_plot, pipe, plan, run)
    return {
        "files": [str(file) for file in files],
        "seed": job.seed,
        "width": job.width,
        "height": job.height,
        "attention": values["Low VRAM attention"],
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "plan": plan.as_dict(),
        "measured": run and run.as_dict(),
        "memory_plot": job.memory_plot and str(job.memory_plot),
    }


def _start_pictures(job: Job) -> dict[str, Any]:
    """The pictures to start from, by the names that pipelines give them."""
    images = {}
    if job.init_image:
        images["image"] = open_picture(job.init_image, "--init-image")
    if job.mask:
        images["mask_image"] = open_picture(job.mask, "--mask", "L")
        (width, height), (wide, high) = images["mask_image"].size, images["image"].size
        if (width, height) != (wide, high):
            note(f"--mask {job.mask} is {width}x{height} and the picture {wide}x{high}: the mask is stretched to it")
    return images


def _attached(pipe: Any) -> Any:
    """The plan by which ``pipe`` runs now."""
    from ..session import attachments

    return attachments(pipe)[-1].plan


def _note_unknown_words(job: Job) -> None:
    """Tell of words that mean nothing to the demo model, which knows a few hundred."""
    if job.model is None:
        unknown = unknown_words(f"{job.prompt} {job.negative}")
        if unknown:
            named = ", ".join(f'"{word}"' for word in unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
            note(f"the demo model does not know {named}: sd-lowvram things lists what it knows")


def _checked_model(job: Job, images: dict[str, Any]) -> Path:
    """Where the model is; its files are whole, of a kind that is served, and the budget can hold a part of it."""
    path = model_path(job.model)
    check_model(path, job.task, job.allow_pickle)
    budget = known_budget(job.vram, job.device)
    if path.suffix.lower() not in PICKLES and budget is not None:
        check_floor(configuration(job.model), *_start_size(job, images), job.batch, budget)
    return path


def _start_size(job: Job, images: dict[str, Any]) -> tuple[int | None, int | None]:
    """The size that is stated, else that of the picture to start from; None: the model's own."""
    if "image" not in images or job.width is not None or job.height is not None:
        return job.width, job.height
    width, height = (max(8, side - side % 8) for side in images["image"].size)
    if max(width, height) > LARGEST_SIDE:
        raise BadInputError(
            f"--init-image {job.init_image} is {width}x{height}, and no side above {LARGEST_SIDE} pixels is served: "
            "give --width and --height"
        )
    return width, height


def _load(job: Job, path: Path) -> tuple[Any, torch.device]:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from ..devices.info import default_device
    from ..devices.support import check_measuring

    device = torch.device(check_device(job.device)) if job.device else default_device()
    if job.memory_plot:
        check_measuring(device)
    wide = device.type == "cpu" or job.settings.precision in _WIDE
    dtype = torch.float32 if wide else torch.float16
    pipe: Any = load_pipeline(path, job.task, dtype, allow_pickle=job.allow_pickle, prediction=job.prediction)
    pipe.set_progress_bar_config(disable=True)
    if job.scheduler:
        set_scheduler(pipe, job.scheduler)
    _check_steps(job, pipe)
    return pipe, device


def _check_steps(job: Job, pipe: Any) -> None:
    """Raise BadInputError where the scheduler cannot go in so many steps."""
    try:
        pipe.scheduler.set_timesteps(job.steps)
    except ValueError as error:
        sampler, reason = label_of(pipe.scheduler)[0], str(error).partition(". ")[0]
        raise BadInputError(f"--steps {job.steps} is not for the scheduler {sampler}: {reason}") from error


def _sized(job: Job, pipe: Any, images: dict[str, Any]) -> Job:
    """``job`` with its size: as stated, else that of the picture to start from, else the model's own."""
    sample = pipe.unet.config.sample_size
    sides = [sample, sample] if isinstance(sample, int) else list(sample)
    own_height, own_width = (side * pipe.vae_scale_factor for side in sides)
    width, height = _start_size(job, images)
    guidance = DEMO_GUIDANCE if job.model is None else USUAL_GUIDANCE
    return dataclasses.replace(
        job,
        width=width or own_width,
        height=height or own_height,
        guidance=guidance if job.guidance is None else job.guidance,
    )


def _optimize(job: Job, pipe: Any, device: torch.device, console: Console) -> Any:
    from .. import optimize
    from .show import show_plan

    with console.status("planning"):
        plan = optimize(
            pipe, vram=job.vram, ram=job.ram, width=job.width, height=job.height, batch=job.batch,
            steps=max(1, job.steps_run), device=device, settings=job.settings, approximate=job.approximate,
        )  # fmt: skip
    show_plan(console, plan)
    console.print(f"seed: {job.seed}", highlight=False)
    return plan


def _run(job: Job, pipe: Any, images: dict[str, Any], console: Console) -> list[Any]:
    import torch
    from PIL import Image

    from .show import Bars

    size = (job.width or 0, job.height or 0)
    extra: dict[str, Any] = {name: image.resize(size, Image.Resampling.LANCZOS) for name, image in images.items()}
    if job.init_image:
        extra["strength"] = job.strength
    if job.task != "img2img":
        extra |= {"width": size[0], "height": size[1]}
    # None, not an empty text: SDXL says in its configuration that it wants zeros then.
    negative = [job.negative] * job.batch if job.negative else None
    # On the CPU, so that a seed means the same picture on every device.
    seeds = [torch.Generator("cpu").manual_seed(((job.seed or 0) + n) % 2**64) for n in range(job.batch)]
    with drawn_in_float32(), Bars(console, shown=not console.quiet).running() as bars:
        result = pipe(
            prompt=[job.prompt] * job.batch, negative_prompt=negative, generator=seeds,
            num_inference_steps=job.steps, guidance_scale=job.guidance,
            callback_on_step_end=_after_step(job.steps_run, bars.update), **extra,
        )  # fmt: skip
    return list(result.images)


def _after_step(steps: int, update: Callable[[str, int, int], None]) -> Callable[..., dict[str, Any]]:
    """A pipeline's callback: moves the bar, and stops before the decoder would turn what is no number into black."""
    update("steps", 0, steps)

    def after(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
        heed_interrupts()
        update("steps", step + 1, steps)
        if step + 1 >= steps and not values["latents"].isfinite().all():
            raise LowVRAMError("the model computed values beyond its number type: try --precision fp32 or bf16")
        return values

    return after


def attention_that_ran(pipe: Any) -> str:
    """The attention kernels that the hook saw running, the most used first; where it was not attached, torch chose."""
    from ..hooks.attention import kernels_that_ran
    from ..session import attachments

    sites = {site.module: site for attachment in attachments(pipe) for site in attachment.anatomy.attentions}
    return " + ".join(kernel for kernel, _ in kernels_that_ran(sites.values()).most_common()) or "torch"


def _parameters(job: Job, pipe: Any, plan: Any) -> dict[str, Any]:
    """What goes into the picture beside the prompts, in the order and by the names of the WebUI."""
    from .. import __version__
    from .show import decided

    sampler, schedule = label_of(pipe.scheduler)
    return {
        "Steps": job.steps,
        "Sampler": sampler,
        "Schedule type": schedule or None,
        "CFG scale": f"{job.guidance:g}",
        "Seed": job.seed,
        "Size": f"{job.width}x{job.height}",
        "Model": "sd-lowvram demo" if job.model is None else Path(job.model).stem,
        "Denoising strength": None if job.strength is None else f"{job.strength:g}",
        "RNG": "CPU",
        "Low VRAM plan": ", ".join(f"{name}={value}" for name, value in decided(plan)) or None,
        "Low VRAM attention": attention_that_ran(pipe),
        "Version": f"sd-lowvram {__version__}",
    }
