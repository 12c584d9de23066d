"""Paints one job after the other with a model that stays loaded and, where shapes are equal, with one plan."""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..checkpoints.inspection import model_path
from ..commands.exit_codes import OURS, code_and_message
from ..commands.inputs import Job
from ..commands.paint import (
    Precaution,
    kernels_before,
    load,
    parameters,
    plan_job,
    plan_of,
    run,
    safety_of,
    schedule,
    size_job,
    start_pictures,
)
from ..commands.pictures import output_paths, parameters_text, png_of
from ..errors import BudgetError
from ..progress import capture_events, log_event
from ..saved_latents.file import ENDING
from .latents import Begun, JobLatents, read_begun
from .marks import CHUNK, FinishedPicture, mark_of, thumbnail

if TYPE_CHECKING:
    import torch

    from ..saved_latents.file import Saved
    from ..saved_latents.keeping import Safety

_SHAPE = ("width", "height", "batch", "steps_run", "guidance", "vram", "ram", "approximate", "settings", "task")


@dataclass(frozen=True)
class Painted:
    """Pictures of a job, their seconds, and the messages of the run."""

    pictures: tuple[FinishedPicture, ...]
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Failed:
    """Why a job failed: a sentence, and the exit code that the command line gives to it."""

    code: int
    message: str


class Painter:
    """A model with its plan, which serve job after job.

    Args:
        share: how many painters share this machine. Budgets that nobody states are this part of what is free: of host
            memory, and of the device where that is host memory too.
    """

    def __init__(self, share: int = 1) -> None:
        self._share = share
        self._part: str | None = None
        self._pipe: Any = None
        self._device: torch.device | None = None
        self._scheduler: Any = None
        self._loaded: Any = None
        self._planned: Any = None

    def attempt(self, job: Job, place: JobLatents | None = None, pictures: int = 1) -> Painted | Failed:
        """Paint a checked ``job``; return the pictures, or the reason why there are none.

        Args:
            place: place of its latents, from which it resumes if they exist; None: latents are not saved.
            pictures: number of pictures that its plan will make in all.
        """
        notes: list[str] = []
        try:
            with warnings.catch_warnings(), capture_events(notes.append):
                warnings.showwarning = lambda message, *_, **__: notes.append(str(message))
                warnings.filterwarnings("ignore")
                warnings.filterwarnings("always", module=r"sd_lowvram(\.|$)")
                painted = self._paint(job, place, pictures)
                return dataclasses.replace(painted, notes=tuple(notes))
        except Exception as error:
            code, message = code_and_message(error)
        if code == OURS:  # nobody knows what it left behind
            self._pipe = self._loaded = None
        return Failed(code, message)

    def _paint(self, job: Job, place: JobLatents | None, planned: int) -> Painted:
        started, asked = time.perf_counter(), job
        console = Console(quiet=True)
        images = start_pictures(job)
        self._load(job)
        job = size_job(self._share_budgets(job), self._pipe, images)
        assert self._device is not None
        before = read_begun(place, job, images, self._device) if place else None
        # One of its own, as a scheduler keeps something of the run before.
        self._pipe.scheduler = type(self._scheduler).from_config(self._scheduler.config)
        schedule(job, self._pipe)
        self._plan(job, before, planned, console)
        saved = before.saved if before else None
        safety = self._safety(job, images, place, saved) if place else None
        drawn = run(job, self._pipe, images, console, safety)
        values = parameters(job, self._pipe, plan_of(self._pipe), kernels_before(saved))
        pictures = []
        for number, image in enumerate(drawn):
            values["Seed"] = (job.seed or 0) + number
            texts = {"parameters": parameters_text(job.prompt, job.negative, values), CHUNK: mark_of(asked, number)}
            pictures.append(FinishedPicture(png_of(image, texts), thumbnail(image)))
        return Painted(tuple(pictures), time.perf_counter() - started, ())

    def _load(self, job: Job) -> None:
        wanted = model_key(job)
        if self._loaded == wanted:
            return
        self._pipe = self._scheduler = self._loaded = self._planned = None  # free memory for the next one
        self._pipe, self._device = load(job, model_path(job.model))
        self._scheduler = self._pipe.scheduler
        self._loaded = wanted

    def _safety(self, job: Job, images: dict[str, Any], place: JobLatents, saved: Saved | None) -> Safety:
        path = Path(place.file)
        files = output_paths(str(path.with_name(path.name.removesuffix(ENDING) + ".png")), job.batch, 0)
        return safety_of(job, self._pipe, images, files, Precaution(place.interval, place=path, start=saved))

    def _plan(self, job: Job, before: Begun | None, pictures: int, console: Console) -> None:
        """Attach a plan for ``job``: its first plan if it is resumed and that plan still fits, else a new one."""
        if before is not None:
            try:
                return self._attach(dataclasses.replace(job, settings=before.settings), pictures, console)
            except BudgetError:
                log_event(
                    __name__, "its plan does not fit any more; with another plan the picture may not be identical"
                )
        return self._attach(job, pictures, console)

    def _attach(self, job: Job, pictures: int, console: Console) -> None:
        from ..session import restore

        assert self._device is not None
        wanted = plan_key(job), pictures
        if self._planned != wanted:
            self._planned = None
            restore(self._pipe)  # what is free is free of the weights, too
            plan_job(job, self._pipe, self._device, console, pictures)
            self._planned = wanted

    def _share_budgets(self, job: Job) -> Job:
        if self._share == 1:
            return job
        from ..devices.info import available_ram

        assert self._device is not None
        self._part = self._part or f"{available_ram() // self._share}B"  # equal for all jobs, so that plans are reused
        vram = self._part if job.vram is None and self._device.type == "cpu" else job.vram
        return dataclasses.replace(job, vram=vram, ram=job.ram or self._part)


def model_key(job: Job) -> tuple[Any, ...]:
    """Key that is equal for jobs that one loaded model can paint."""
    return (job.model, job.task, job.prediction, job.settings.precision, job.device, job.allow_pickle)


def plan_key(job: Job) -> tuple[Any, ...]:
    """Key that is equal for jobs that one plan can paint."""
    return tuple(getattr(job, name) for name in _SHAPE)
