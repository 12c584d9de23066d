"""``unet generate``: what was typed, and a run whose UNet changes between steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...checkpoints.inspection import model_path
from ...commands.exit_codes import exit_on_error
from ...commands.generate import check_prompt_given, print_result
from ...commands.inputs import PICTURE, RUN, SPLIT, Job, check_job, option
from ...commands.knobs import add_field_options, add_knob_options
from ...commands.values import MOST_STEPS, checked_settings
from ...errors import BadInputError
from ..turns import NAME, OWN, parse_turns
from .unet import unet

if TYPE_CHECKING:
    from rich.console import Console


class ScheduledSteps(NamedTuple):
    """Steps of one UNet; ``path`` None: the model's own."""

    name: str
    path: Path | None
    steps: int


@unet.command()
@add_knob_options
@add_field_options(
    Job, **dict.fromkeys(SPLIT), steps=1, init_image=None, strength=None, mask=None, policy=None, memory_plot=None
)
def generate(
    context: typer.Context,
    job: Job,
    schedule: Annotated[
        str,
        option(
            "--schedule",
            text='UNets that take the steps in turn, "small:10,full:15": full is the model\'s own, --unet names the '
            "rest.",
            panel=PICTURE,
            metavar="NAME:STEPS,...",
        ),
    ],
    named: Annotated[
        list[str] | None,
        option(
            "--unet",
            text="A UNet of the schedule: a folder that unet prune, combine or distil wrote, or a unet folder in one. "
            "May be repeated.",
            panel=PICTURE,
            metavar="NAME=PATH",
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print one JSON object and nothing else.", panel=RUN)] = False,
    quiet: Annotated[bool, option("--quiet", "-q", text="Print only the files' names.", panel=RUN)] = False,
    debug: Annotated[bool, option("--debug", text="Show the traceback of an error.", panel=RUN)] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Make a picture whose steps several UNets take in turn; it differs from what each of them draws alone."""
    with exit_on_error(debug):
        check_prompt_given(context)
        parts = parse_schedule(schedule, named or ())
        job = dataclasses.replace(job, steps=sum(part.steps for part in parts))
        job = check_job(dataclasses.replace(job, settings=checked_settings(settings or {}, job.policy)))
        from rich.console import Console

        print_result(paint_scheduled(job, parts, Console(stderr=True, quiet=quiet or as_json)), as_json, quiet)


def parse_schedule(text: str, named: Sequence[str]) -> tuple[ScheduledSteps, ...]:
    """The parts of a schedule "small:10,full:15".

    Args:
        named: "small=PATH" each, split at the first "=".

    Raises:
        BadInputError: not of this form, an unknown or unused name, fewer than one step, or too many.
    """
    paths = _paths(named)
    turns = parse_turns(text, paths, "--schedule", "; --unet {name}=FOLDER")
    parts = tuple(ScheduledSteps(name, paths.get(name), count) for name, count in turns)
    total = sum(part.steps for part in parts)
    if total > MOST_STEPS:
        raise BadInputError(f"the steps of --schedule {text!r} add up to {total}: at most {MOST_STEPS} are served")
    return parts


def _paths(named: Sequence[str]) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for part in named:
        name, equals, path = part.partition("=")
        if not equals or not path or not NAME.fullmatch(name):
            raise BadInputError(f"--unet {part!r} must be NAME=PATH, the name of letters, digits and _.-: small=FOLDER")
        if name == OWN or name in paths:
            whose = "is the model's own UNet" if name == OWN else "was given before"
            raise BadInputError(f"--unet {part!r}: the name {name} {whose}; choose another")
        paths[name] = Path(path)
    return paths


def paint_scheduled(job: Job, parts: Sequence[ScheduledSteps], console: Console) -> dict[str, Any]:
    """Make and save the picture of a checked ``job`` with several UNets; return plain values for ``--json``.

    No latents are saved: an interrupted run starts from the beginning.

    Raises:
        LowVRAMError: with the exit code of the command line.
    """
    from ...commands import paint
    from ...commands.interrupts import heed_interrupts, terminated_as_interrupted
    from ...commands.memory_plot import measured_run
    from ...commands.pictures import check_writable, output_paths, parameters_text, save_picture
    from ...commands.show import loading, show_plan
    from ..checkpoints.load_unet import load_unet
    from ..schedule import check_settings, scheduled

    check_settings(job.settings)
    files = output_paths(job.output, job.batch, job.seed or 0)
    paint.note_unknown_words(job)
    check_writable(files[0], 1)
    path = paint.checked_model(job, {})
    folders = _checked_folders(job, parts)
    started = time.perf_counter()
    with loading(console, job.model):
        pipe, device = paint.load(job, path)
        paint.schedule(job, pipe)
        own = {OWN: pipe.unet}
        unets = own | {name: load_unet(folder, pipe.unet.dtype) for name, folder in folders.items()}
    heed_interrupts()
    loaded = time.perf_counter()
    job = paint.size_job(job, pipe, {})
    check_writable(files[0], job.batch * ((job.width or 0) * (job.height or 0) * 4 + (64 << 10)))
    turns = [(unets[part.name], part.steps) for part in parts]
    within: dict[str, Any] = {"vram": job.vram, "ram": job.ram, "width": job.width, "height": job.height}
    within |= {"device": device, "settings": job.settings, "approximate": job.approximate, "batch": job.batch}
    with console.status("planning") as status, scheduled(pipe, turns, **within) as plan, terminated_as_interrupted():
        status.stop()
        planned = time.perf_counter()
        show_plan(console, plan)
        console.print(f"seed: {job.seed}", highlight=False)
        pictures, taken = measured_run(job, pipe, plan, lambda: paint.run(job, pipe, {}, console))
        values = paint.parameters(job, pipe, plan) | {"Low VRAM UNets": schedule_text(parts)}
    for number, (picture, file) in enumerate(zip(pictures, files, strict=True)):
        values["Seed"] = (job.seed or 0) + number
        save_picture(picture, file, parameters_text(job.prompt, job.negative, values))
    seconds = {"load": loaded - started, "plan": planned - loaded, "run": time.perf_counter() - planned}
    return {
        "files": [str(file) for file in files],
        "latents": None,
        "seed": job.seed,
        "width": job.width,
        "height": job.height,
        "attention": values["Low VRAM attention"],
        "unets": [{"name": part.name, "steps": part.steps} for part in parts],
        "seconds": {stage: round(value, 3) for stage, value in seconds.items()},
        "plan": plan.as_dict(),
        "measured": taken and taken.as_dict(),
        "memory_plot": None,
    }


def schedule_text(parts: Sequence[ScheduledSteps]) -> str:
    """The schedule as it is typed, for the picture's text."""
    return " ".join(f"{part.name}:{part.steps}" for part in parts)


def _checked_folders(job: Job, parts: Sequence[ScheduledSteps]) -> dict[str, Path]:
    """Paths of the UNets in addition to the model's own, checked against it before anything is loaded."""
    from ...checkpoints.inspection import PICKLES, configuration
    from ..checkpoints.load_unet import configuration_of_unet, unet_folder
    from ..schedule import check_match

    folders = {part.name: unet_folder(part.path) for part in parts if part.path is not None}
    model = model_path(job.model)
    if model.suffix.lower() in PICKLES:  # its UNet is known once it is loaded
        return folders
    own = configuration_of_unet(model / "unet") if model.is_dir() else configuration(job.model)["unet"]
    for name, folder in folders.items():
        other = configuration_of_unet(folder)
        both_say = "prediction_type" in own and "prediction_type" in other
        check_match(own, other if both_say else {**other, "prediction_type": own.get("prediction_type")}, (OWN, name))
    return folders
