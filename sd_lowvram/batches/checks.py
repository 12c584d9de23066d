"""Checks before the first job of a batch: models, input pictures, space for new pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..commands.exit_codes import name_options
from ..commands.inputs import Job
from ..commands.paint import checked_model, note_unknown_words, start_pictures
from ..commands.pictures import check_writable
from ..errors import BadInputError, LowVRAMError, OutputError
from .jobs import Task
from .journal import asked_names

_FILES = ("model", "init_image", "mask", "prediction", "allow_pickle", "device", "vram", "width", "height", "batch")


def check_files(tasks: Sequence[Task], *, here: bool) -> None:
    """Check each model and picture that jobs name once; warn of words that the demo model does not know.

    Args:
        here: True if this machine paints them; its free memory says nothing about other machines.

    Raises:
        LowVRAMError: a file cannot be used, or a job's budget is too small; the message names the line.
    """
    seen: set[tuple[Any, ...]] = set()
    for task in tasks:
        job = task.job
        facts = tuple(getattr(job, name) for name in _FILES)
        if facts in seen:
            continue
        seen.add(facts)
        try:
            images = start_pictures(job)
            if here:
                checked_model(job, images)
            elif job.model is None or Path(job.model).exists():  # else where it is painted
                checked_model(dataclasses.replace(job, device="cuda"), images)
        except LowVRAMError as error:
            error.args = (f"line {task.line}: {name_options(str(error))}",)
            raise
    prompts = [f"{task.job.prompt} {task.job.negative}" for task in tasks if task.job.model is None]
    if prompts:
        note_unknown_words(Job("\n".join(prompts)))


def check_names(folder: Path, tasks: Sequence[Task]) -> None:
    """Check that no link in ``folder`` leads the picture of a job out of it.

    Raises:
        BadInputError: a link leads out of the folder.
    """
    for task in tasks:
        for name in asked_names(task) or ():
            try:
                inside(folder, name)
            except BadInputError as error:
                raise BadInputError(f"line {task.line}: {error}") from None


def inside(folder: Path, name: str) -> Path:
    """Return the place of the picture ``name`` in ``folder``.

    Raises:
        BadInputError: a link leads out of the folder.
    """
    place = folder / name
    try:
        whither = place.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise BadInputError(f"the output {name} cannot be followed in {folder} ({error}): give another name") from error
    if not whither.is_relative_to(folder.resolve()):
        raise BadInputError(f"the output {name} leads out of {folder} by a link, to {whither}: give another name")
    return place


def check_place(folder: Path) -> None:
    """Create ``folder``, and check that it can be written.

    Raises:
        BadInputError: ``folder`` is not a folder. OutputError: it cannot be written, or the disk is full.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"--out {folder} is not a folder: give one, or a new name")
    try:
        check_writable(folder / "a.png", 1 << 20)
    except OutputError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
        raise OutputError(f"--out {folder} cannot be written ({reason}): give another --out") from error
    folder.mkdir(parents=True, exist_ok=True)
