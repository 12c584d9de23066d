"""Comparison of a run with its plan by ``generate``: record it, warn if it exceeded the plan, draw both."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutputError
from ..plots.memory import memory_png
from ..plots.style import check_plots
from ..progress import log_event
from .inputs import Job
from .pictures import check_writable, save_picture

if TYPE_CHECKING:
    from ..planning.memory_profile import MeasuredRun

_LARGEST = 1 << 20


def check_plot(path: Path | None) -> None:
    """Raise BadInputError unless a plot, if one is wanted, can be drawn and written to ``path``."""
    if path is None:
        return
    check_plots()
    if path.suffix.lower() != ".png":
        raise OutputError(f"--memory-plot {path} must end in .png")
    check_writable(path, _LARGEST)


def measured_run(job: Job, pipe: Any, plan: Any, run: Callable[[], list[Any]]) -> tuple[list[Any], MeasuredRun | None]:
    """The pictures of ``run`` and what it took; logs it when that is more than planned.

    A GPU reports its peaks at no cost. On a CPU every allocation has to be recorded, so only for a plot.
    """
    if job.memory_plot is None and plan.request.device.type != "cuda":
        return run(), None
    from ..planning.memory_profile import measured, overrun

    with measured(pipe) as seen:
        pictures = run()
    message = overrun(plan, seen)
    if message:
        log_event(__name__, message)
    return pictures, seen


def draw(path: Path, pipe: Any, plan: Any, run: MeasuredRun) -> None:
    """Write the plot of ``plan`` and ``run`` to ``path``, whole or not at all."""
    from PIL import Image

    from ..planning.timeline import timelines_of

    save_picture(Image.open(io.BytesIO(memory_png(plan, run, timelines_of(pipe, plan)))), path, "")
