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


def group_by_shape(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group the tasks that one model and one plan can paint, in the order of the file.

    A missing size is that of the input picture; without an input picture it is the model's, and counts as different
    from every stated size.
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
    """Map the line of each job to the number of pictures that a plan for it will make.

    Each of the ``workers`` paints jobs of one shape together, with its own plan. The number is its share, rounded down,
    at least one job's."""
    return {
        task.line: max(1, len(alike) // workers) * task.job.batch for alike in group_by_shape(tasks) for task in alike
    }
