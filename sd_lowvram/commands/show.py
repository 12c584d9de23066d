"""Output while a picture is made: bars for steps and decode strips, and a table of the plan."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..planning.wording import drop_peak
from ..progress import listen
from ..units import format_time

_COUNTED = 250
"""More parts than these are no steps that anybody counts."""


class _Done(ProgressColumn):
    """Steps as "3/30"; the many strips of a decode as a percentage."""

    def render(self, task: Task) -> Text:
        total = int(task.total or 0)
        done = f"{task.percentage:.0f}%" if total > _COUNTED else f"{int(task.completed)}/{total}"
        return Text(done, style="progress.download")


class Bars:
    """Bars, one for each stage, made when its first part is done."""

    def __init__(self, console: Console, shown: bool) -> None:
        columns = (TextColumn("{task.description:>8}"), BarColumn(), _Done(), TimeRemainingColumn())
        seen = sys.stdout.isatty()  # then what is printed goes above the bars; into a file it goes past them
        self._progress = Progress(*columns, console=console, disable=not shown, redirect_stdout=seen)
        self._tasks: dict[str, TaskID] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        if not self._tasks:
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    @contextlib.contextmanager
    def running(self) -> Iterator[Bars]:
        """Show bars within the block, from the first finished part on."""
        try:
            with listen(self.update):
                yield self
        finally:
            if self._tasks:
                self._progress.stop()


@contextlib.contextmanager
def loading(console: Console, model: str | Path | None) -> Iterator[None]:
    """Print which model loads, and show a spinner within the block; that one is seen on terminals alone."""
    console.print(f"loading {Path(model).name if model else 'the demo model'}", highlight=False, markup=False)
    with console.status("loading"):
        yield


def show_plan(console: Console, plan: Any) -> None:
    """Print a line with the choices and the time, and the reasons; the peak is printed with the picture."""
    chosen = ", ".join(f"{name} {'on' if value is True else value}" for name, value in decided_knobs(plan))
    about = f"about {format_time(plan.predicted.seconds)}"
    console.print(f"plan: {chosen or 'nothing changed'} ({plan.fidelity}), {about}", highlight=False)
    for reason in drop_peak(plan.reasons):
        console.print(f"  {reason}", style="dim", highlight=False)


def decided_knobs(plan: Any) -> list[tuple[str, Any]]:
    """Name and value of the knobs that the plan sets to something."""
    return [(name, value) for name, _, value in plan.settings.decided() if value not in (False, "off", "none")]
