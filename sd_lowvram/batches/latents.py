"""The latents of a batch's jobs: their files while a job is painted, and resuming from them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..commands.inputs import Job
from ..commands.latents import job_of, libraries, pictures_as_tensors
from ..errors import BadInputError
from ..files import sweep
from ..progress import log_event
from ..saved_latents.file import ENDING, Saved, read_saved
from ..saved_latents.interval import Interval
from ..settings import Settings

if TYPE_CHECKING:
    import torch

_FOLDER = "latents"

_MAY_DIFFER = ("vram", "ram", "device", "output", "allow_pickle", "settings", "init_image", "mask")
"""Fields that say where a run was made, and those that are looked at on their own."""


@dataclass(frozen=True)
class JobLatents:
    """File and interval of a job's latents.

    Attributes:
        file: path as text, because the worker may run another system.
    """

    file: str
    interval: Interval = dataclasses.field(default_factory=Interval)


@dataclass(frozen=True)
class Begun:
    """A job of which steps are done, and the settings by which they were."""

    saved: Saved
    settings: Settings


def place_in(folder: Path, number: int, interval: Interval) -> JobLatents:
    """The place for the job ``number`` of the journal of the batch in ``folder``."""
    return JobLatents(os.path.abspath(folder / _FOLDER / f"{number:05d}{ENDING}"), interval)


def batch_of(place: JobLatents) -> Path:
    """The folder of the batch to which ``place`` belongs."""
    return Path(place.file).parent.parent


def remove(place: JobLatents) -> None:
    """Remove the latents of a job that has its result."""
    Path(place.file).unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Delete everything but latents from the batch's ``folder`` of latents; no worker may be running."""
    sweep(folder / _FOLDER)
    with contextlib.suppress(OSError):  # there are latents in it, or it never was
        (folder / _FOLDER).rmdir()


def read_begun(place: JobLatents, job: Job, images: dict[str, Any], device: torch.device) -> Begun | None:
    """Return the saved state of a job, if it can be resumed.

    Unusable latents, and the step from which the job resumes, are logged.

    Args:
        place: place of the latents.
        job: the job, with its size.
        images: its input pictures.
        device: device that computes.

    Returns:
        The state; None if the job starts from the beginning.
    """
    path = Path(place.file)
    if not path.exists():
        return None
    try:
        saved = read_saved(path)
        before = job_of(path, saved, {"model": job.model})
    except BadInputError as error:
        log_event(__name__, f"it was started again: {error}")
        return None
    if not _is_same(job, before[0], saved, images, device):
        log_event(__name__, "it was started again: its latents are of another run")
        return None
    origin = "" if saved.about.get("libraries") == libraries() else " of other versions of torch or diffusers"
    log_event(__name__, f"it went on from step {saved.about['step']} of {saved.about['steps']}{origin}")
    return Begun(saved, before[0].settings)


def _is_same(job: Job, before: Job, saved: Saved, images: dict[str, Any], device: torch.device) -> bool:
    """True if ``saved``, of the run ``before``, belongs to ``job``."""
    import torch

    if dataclasses.replace(before, **{name: getattr(job, name) for name in _MAY_DIFFER}) != job:
        return False
    if saved.about.get("asked_settings") != job.settings.as_dict() or before.task != job.task:
        return False
    if before.device is None or torch.device(before.device).type != device.type:
        return False
    pictures = pictures_as_tensors(images, (job.width or 0, job.height or 0))
    return all(name in saved.tensors and torch.equal(saved.tensors[name], tensor) for name, tensor in pictures.items())
