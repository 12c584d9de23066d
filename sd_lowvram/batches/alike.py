"""Jobs that one plan serves, and how many pictures it makes: for many it may compile the model.

All jobs of the file count, those that are done too: a batch that goes on plans as it did before, for the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..commands.inputs import Job
from ..commands.paint import start_size
from ..commands.values import open_picture
from .jobs import Task
from .painter import model_key, plan_key


def by_shape(tasks: Sequence[Task]) -> list[list[Task]]:
    """Those together that one model and one plan can paint, in the order of the file.

    A size that is left to a picture to start from is that picture's; one that is left to the model is taken for
    another than those that are stated.
    """
    shapes: dict[Any, list[Task]] = {}
    for task in tasks:
        shapes.setdefault(_shape(task.job), []).append(task)
    return list(shapes.values())


def _shape(job: Job) -> Any:
    width, height = job.width, job.height
    if job.init_image is not None and width is None:
        width, height = start_size(job, {"image": open_picture(job.init_image, "--init-image")})
    return model_key(job), plan_key(dataclasses.replace(job, width=width, height=height))


def pictures_by_line(tasks: Sequence[Task], workers: int) -> dict[int, int]:
    """By the line of each job, how many pictures a plan for it will make: what falls to each of so many ``workers``,
    which paint jobs of one shape together, each by a plan of its own; rounded down, and one job's at the least."""
    return {task.line: max(1, len(alike) // workers) * task.job.batch for alike in by_shape(tasks) for task in alike}
