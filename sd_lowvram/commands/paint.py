"""The work of ``generate``: load, plan, run, save; every check comes before the time that it could waste."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.architectures import type_for
from ..checkpoints.fingerprint import fingerprint
from ..checkpoints.inspection import PICKLES, check_model, configuration, model_path
from ..checkpoints.load import load_pipeline
from ..checkpoints.schedulers import label_of, set_scheduler
from ..demo import SIDE as DEMO_SIDE
from ..demo.things import unknown_words
from ..errors import BadInputError
from ..policies import POLICIES, check_policy
from ..saved_latents.file import Saved
from ..saved_latents.interval import Interval
from .early import check_floor, known_budget
from .guidance import check_calls, check_scheduler, guidance_arguments, is_guided, takes_size, usual_guidance
from .inputs import DEMO_GUIDANCE, Job
from .interrupts import heed_interrupts, terminated_as_interrupted
from .latents import about_run, pictures_as_tensors, place_of
from .memory_plot import check_plot, draw, measured_run
from .noise import drawn_in_float32
from .pictures import check_writable, output_paths, parameters_text, save_picture
from .previews import previews
from .streams import note
from .values import LARGEST_SIDE, open_picture

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..saved_latents.keeping import Keeper, Safety

_NAMED = 8
"""More unknown words than these are not named."""

_WIDE = ("fp32", "tf32", "autocast-fp16", "autocast-bf16")


@dataclass(frozen=True)
class Precaution:
    """Options for resuming a run.

    Attributes:
        interval: interval at which its latents are written.
        keep: True if the latents stay after the pictures are done.
        place: the file of the latents; None: next to the picture.
        start: contents of that file, from which the run resumes.
        retyped: True if the run resumes in another number type than the file's.
    """

    interval: Interval = dataclasses.field(default_factory=Interval)
    keep: bool = False
    place: Path | None = None
    start: Saved | None = None
    retyped: bool = False


def paint(
    job: Job, console: Console, precaution: Precaution | None = None, preview: int | None = None
) -> dict[str, Any]:
    """Make and save the pictures of a checked ``job``; plain values for ``--json``. Progress goes to ``console``.

    Args:
        preview: steps between two looks at what the pictures are about to be; None: there are none.

    Raises:
        LowVRAMError: with the exit code that the command line gives.
    """
    files = output_paths(job.output, job.batch, job.seed or 0)
    note_unknown_words(job)
    return finish(job, start_pictures(job), files, console, precaution or Precaution(), preview)


def finish(
    job: Job,
    images: dict[str, Any],
    files: list[Path],
    console: Console,
    precaution: Precaution,
    preview: int | None = None,
) -> dict[str, Any]:
    """The work of :func:`paint` from its pictures to start from on."""
    from .show import loading

    # A first look at the output's place, before the model is loaded; the second knows the size.
    check_writable(files[0], 1)
    check_plot(job.memory_plot)
    path = checked_model(job, images)
    started = time.perf_counter()
    with loading(console, job.model):
        pipe, device = load(job, path)
        schedule(job, pipe)
    heed_interrupts()
    loaded = time.perf_counter()
    job = size_job(job, pipe, images)
    _note_size(job)
    check_writable(files[0], job.batch * ((job.width or 0) * (job.height or 0) * 4 + (64 << 10)))
    shown = previews(pipe, job, preview, files, console)  # a map of colours is fitted while all weights are here
    plan = plan_job(job, pipe, device, console)
    planned = time.perf_counter()
    safety, moments = safety_of(job, pipe, images, files, precaution), list[float]()
    with _report_latents(safety.path), shown:
        pictures, taken = measured_run(job, pipe, plan, lambda: run(job, pipe, images, console, safety, moments))
        plan = plan_of(pipe)  # a leaner one, where the device ran out of memory
        values = parameters(job, pipe, plan, kernels_before(precaution.start))
        for number, (picture, file) in enumerate(zip(pictures, files, strict=True)):
            values["Seed"] = (job.seed or 0) + number
            save_picture(picture, file, parameters_text(job.prompt, job.negative, values))
    if not precaution.keep:
        safety.path.unlink(missing_ok=True)
    seconds = {"load": loaded - started, "plan": planned - loaded, "run": time.perf_counter() - planned}
    if precaution.start is None:
        seconds["first_step_excess"] = _first_step_excess(moments)
    if job.memory_plot and taken:
        draw(job.memory_plot, pipe, plan, taken)
    return {
        "files": [str(file) for file in files],
        "latents": str(safety.path) if safety.path.exists() else None,
        "seed": job.seed,
        "width": job.width,
        "height": job.height,
        "attention": values["Low VRAM attention"],
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "plan": plan.as_dict(),
        "measured": taken and taken.as_dict(),
        "memory_plot": job.memory_plot and str(job.memory_plot),
    }


def _first_step_excess(moments: list[float]) -> float:
    """Seconds by which all before the second step took longer than a later step; 0 if there is none.

    Args:
        moments: when the run began, and when each step ended.
    """
    if len(moments) < _FEWEST_MOMENTS:
        return 0.0
    first, *later = (after - before for before, after in itertools.pairwise(moments))
    return max(0.0, first - statistics.median(later))


_FEWEST_MOMENTS = 3


def safety_of(job: Job, pipe: Any, images: dict[str, Any], files: list[Path], precaution: Precaution) -> Safety:
    """The file of this run's latents, and what is stored with them."""
    from ..saved_latents.keeping import Safety

    model = functools.cache(lambda: fingerprint(model_path(job.model)))

    def about() -> dict[str, Any]:
        kernels = kernels_so_far(pipe, kernels_before(precaution.start))
        return {**about_run(job, plan_of(pipe), files, model()), "attention": kernels}

    pictures = pictures_as_tensors(images, (job.width or 0, job.height or 0))
    path = precaution.place or place_of(files[0])
    return Safety(path, about, pictures, precaution.interval, precaution.start, precaution.retyped)


def kernels_before(start: Saved | None) -> dict[str, int]:
    """The attention kernels that ran up to ``start``, with counts."""
    return start.about.get("attention", {}) if start else {}


@contextlib.contextmanager
def _report_latents(path: Path) -> Iterator[None]:
    """Add to an error in the block the name of the file from which the run resumes, if there is one."""
    try:
        with terminated_as_interrupted():
            yield
    except BaseException:
        if path.exists():
            note(f"the latents are in {path}: sd-lowvram resume {shlex.quote(str(path))} continues from there")
        raise


def start_pictures(job: Job) -> dict[str, Any]:
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


def plan_of(pipe: Any) -> Any:
    """The plan by which ``pipe`` runs now."""
    from ..session import attachments

    return attachments(pipe)[-1].plan


def _note_size(job: Job) -> None:
    """Warn that the demo model, which was trained at one size, draws poorly at other sizes."""
    if job.model is None and (job.width, job.height) != (DEMO_SIDE, DEMO_SIDE):
        note(
            f"the demo model knows {DEMO_SIDE}x{DEMO_SIDE} alone, and draws poorly at {job.width}x{job.height}: leave "
            "--width and --height out"
        )


def note_unknown_words(job: Job) -> None:
    """Warn of words that mean nothing to the demo model, which knows a few hundred."""
    if job.model is None:
        unknown = unknown_words(f"{job.prompt} {job.negative}")
        if unknown:
            named = ", ".join(f'"{word}"' for word in unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
            note(f"the demo model does not know {named}: sd-lowvram generate --list-things lists what it knows")


def checked_model(job: Job, images: dict[str, Any]) -> Path:
    """Path of the model, after checks: complete files of a supported kind, and a budget that can hold a part of it."""
    path = model_path(job.model)
    check_model(path, job.task, job.allow_pickle)
    budget = known_budget(job.vram, job.device)
    if path.suffix.lower() not in PICKLES and budget is not None:
        check_floor(configuration(job.model), *start_size(job, images), job.batch, budget)
    return path


def start_size(job: Job, images: dict[str, Any]) -> tuple[int | None, int | None]:
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


def load(job: Job, path: Path) -> tuple[Any, torch.device]:
    """The pipeline for the task of ``job``, and where it computes."""
    import torch

    from ..devices.support import check_measuring, device_of

    device = device_of(job.device, "--device")
    check_policy(job.policy, device.type)
    if job.memory_plot:
        check_measuring(device)
    wide = device.type == "cpu" or job.settings.precision in _WIDE
    dtype = torch.float32 if wide else type_for(configuration(job.model) if path.is_dir() else {}, torch.float16)
    pipe: Any = load_pipeline(path, job.task, dtype, allow_pickle=job.allow_pickle, prediction=job.prediction)
    pipe.set_progress_bar_config(disable=True)
    return pipe, device


def schedule(job: Job, pipe: Any) -> None:
    """Give ``pipe`` the scheduler of ``job``; a BadInputError where it cannot go in so many steps."""
    if job.scheduler:
        check_scheduler(job.scheduler, pipe)
        rescaled = pipe.scheduler.config.get("rescale_betas_zero_snr")
        set_scheduler(pipe, job.scheduler)
        if rescaled and not pipe.scheduler.config.get("rescale_betas_zero_snr"):
            note(
                f"the model was trained down to pure noise (zero terminal SNR), which the scheduler {job.scheduler} "
                "does not reach: pictures get greyer. euler, ddim and dpm++-2m do"
            )
    shifts = {"mu": 1.0} if pipe.scheduler.config.get("use_dynamic_shifting") else {}  # by the size, in a run
    try:
        pipe.scheduler.set_timesteps(job.steps, **shifts)
    except ValueError as error:
        sampler, reason = label_of(pipe.scheduler)[0], str(error).partition(". ")[0]
        raise BadInputError(f"--steps {job.steps} is not for the scheduler {sampler}: {reason}") from error


def size_job(job: Job, pipe: Any, images: dict[str, Any]) -> Job:
    """``job`` with its size: as stated, else that of the picture to start from, else the model's own."""
    from ..models.latents import own_size
    from ..session import anatomy_of

    own_width, own_height = own_size(anatomy_of(pipe))
    width, height = start_size(job, images)
    guidance = DEMO_GUIDANCE if job.model is None else usual_guidance(pipe)
    check_calls(job, pipe)
    return dataclasses.replace(
        job,
        width=width or own_width,
        height=height or own_height,
        guidance=guidance if job.guidance is None else job.guidance,
    )


def plan_job(job: Job, pipe: Any, device: torch.device, console: Console, pictures: int = 1) -> Any:
    """Plan ``job`` and equal jobs, ``pictures`` in all; print and attach the plan."""
    from .. import optimize
    from .. import plan as predict
    from ..planning.as_others import attach_own
    from .show import show_plan

    own = job.policy is not None and POLICIES[job.policy].own
    with console.status("planning"):
        plan = (predict if own else optimize)(
            pipe, vram=job.vram, ram=job.ram, width=job.width, height=job.height, batch=job.batch,
            steps=max(1, job.steps_run), pictures=pictures, device=device, settings=job.settings,
            approximate=job.approximate, guided=is_guided(job, pipe),
        )  # fmt: skip
        if own:
            attach_own(pipe, job.policy or "", plan)
    show_plan(console, plan)
    console.print(f"seed: {job.seed}", highlight=False)
    return plan


def run(
    job: Job,
    pipe: Any,
    images: dict[str, Any],
    console: Console,
    safety: Safety | None = None,
    moments: list[float] | None = None,
) -> list[Any]:
    """The pictures of ``job``, by what is attached to ``pipe``.

    Args:
        safety: where its latents are saved during the run; None: nowhere.
        moments: takes the time at which the run begins, and those at which its steps end.
    """
    import torch
    from PIL import Image

    from ..saved_latents.keeping import keep_latents
    from .show import Bars

    size = (job.width or 0, job.height or 0)
    extra: dict[str, Any] = {name: image.resize(size, Image.Resampling.LANCZOS) for name, image in images.items()}
    if job.init_image:
        extra["strength"] = job.strength
    if job.task != "img2img" or takes_size(pipe):
        extra |= {"width": size[0], "height": size[1]}
    # On the CPU, so that a seed means the same picture on every device.
    seeds = [torch.Generator("cpu").manual_seed(((job.seed or 0) + n) % 2**64) for n in range(job.batch)]
    keeping = keep_latents(pipe, seeds, safety) if safety else contextlib.nullcontext()
    moments = [] if moments is None else moments
    with drawn_in_float32(), Bars(console, shown=not console.quiet).running() as bars, keeping as keeper:
        result = pipe(
            prompt=[job.prompt] * job.batch, generator=seeds, num_inference_steps=job.steps,
            **guidance_arguments(job, pipe),
            callback_on_step_end=_step_callback(job.steps_run, bars.update, keeper, moments), **extra,
        )  # fmt: skip
    heed_interrupts()
    return list(result.images)


def _step_callback(
    steps: int, update: Callable[[str, int, int], None], keeper: Keeper | None, moments: list[float]
) -> Callable[..., dict[str, Any]]:
    """A pipeline's callback: moves the bar, keeps the latents, and stops where they are no numbers any more.

    The present time is appended to ``moments``, and the time at which each step ends.
    """
    from ..saved_latents.keeping import nan_error

    update("steps", 0, steps)
    moments.append(time.perf_counter())

    def end_step(pipe: Any, step: int, _: Any, values: dict[str, Any]) -> dict[str, Any]:
        calls = max(getattr(pipe, "num_timesteps", None) or 0, steps)  # more than steps with plms, heun and the like
        done = (step + 1) * steps // calls
        if keeper:
            values = keeper.record_step(step + 1, values)
        elif not values["latents"].isfinite().all():
            raise nan_error(done, steps)
        heed_interrupts()
        moments.append(time.perf_counter())
        update("steps", done, steps)
        return values

    return end_step


def kernels_so_far(pipe: Any, before: dict[str, int]) -> dict[str, int]:
    """Number of runs of each attention kernel, counted by the hook; ``before``: of an earlier part of the run."""
    from ..hooks.numbers.attention import kernel_counts
    from ..session import attachments

    sites = {site.module: site for attachment in attachments(pipe) for site in attachment.anatomy.attentions}
    return dict(Counter(before) + kernel_counts(sites.values()))


def parameters(job: Job, pipe: Any, plan: Any, kernels: dict[str, int] | None = None) -> dict[str, Any]:
    """Parameters in the picture in addition to the prompts, in the order and with the names of the WebUI.

    Args:
        kernels: the attention kernels of an earlier part of the run, with counts.
    """
    from ..files import __version__
    from .show import decided_knobs

    sampler, schedule = label_of(pipe.scheduler)
    # The most used first; where the hook was not attached, torch chose.
    attention = [kernel for kernel, _ in Counter(kernels_so_far(pipe, kernels or {})).most_common()]
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
        "Low VRAM plan": ", ".join(f"{name}={value}" for name, value in decided_knobs(plan)) or None,
        "Low VRAM ran out": " + ".join(step.name for step in plan.fallback_steps) or None,
        "Low VRAM attention": " + ".join(attention) or "torch",
        "Version": f"sd-lowvram {__version__}",
    }
