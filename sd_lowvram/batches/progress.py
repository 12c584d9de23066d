"""Progress of a batch: a live table on a terminal, a line for each job anywhere else."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..checkpoints.inspection import configuration
from ..commands.early import own_size
from ..commands.inputs import Job
from ..commands.streams import give_up_stdout, tell
from ..errors import LowVRAMError
from ..units import format_time
from .driver import JobEvent
from .journal import JournalEntry

_PROMPT = 48
"""Characters of a prompt that are shown."""

_LAST = 8
"""Lines of the table for jobs that have ended."""

_USUAL = 512
"""Pixels a side, if neither the job nor the model's configuration has a size."""


class Progress:
    """Counts and times the jobs of one run.

    Args:
        earlier: jobs of the batch that had their results before this run.
    """

    def __init__(self, entries: Sequence[JournalEntry], earlier: int) -> None:
        self._total = earlier + len(entries)
        self._earlier = earlier
        self._left = sum(_weight(entry.job) for entry in entries)
        self._started = time.perf_counter()
        self._finished = 0.0
        self._pictures = 0
        self.done = 0
        self.failed: list[JobEvent] = []

    def count(self, event: JobEvent) -> None:
        """Take note of what happened."""
        if event.what == "done":
            self.done += 1
            self._pictures += len(event.entry.files)
            self._finished += _weight(event.entry.job)
        if event.what == "failed":
            self.failed.append(event)
        if event.what in ("done", "failed"):
            self._left -= _weight(event.entry.job)

    @property
    def seconds(self) -> float:
        """Time since the run began."""
        return time.perf_counter() - self._started

    @property
    def state(self) -> str:
        """State as text: "3 of 40 done, 1 failed"."""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self._earlier + self.done} of {self._total} done{failed}"

    @property
    def pictures_an_hour(self) -> float:
        return self._pictures / self.seconds * 3600

    @property
    def pace(self) -> str:
        """Pace as text: "120 pictures an hour, 20 min left"; empty before the first picture.

        A job counts by its pixels and steps."""
        if not self._finished:
            return ""
        left = self._left / self._finished * self.seconds
        return f"{self.pictures_an_hour:.0f} pictures an hour, {format_time(left)} left"


def _weight(job: Job) -> int:
    """Work in a job, for its share of the time: pixels by steps."""
    width, height = _own_size(job.model)
    return (job.width or width) * (job.height or height) * job.batch * max(1, job.steps_run)


@functools.cache
def _own_size(model: str | None) -> tuple[int, int]:
    try:
        return own_size(configuration(model))[:2]
    except LowVRAMError:  # a pickle, or a model that only the workers have
        return _USUAL, _USUAL


class Lines:
    """A line for each job that has ended: on standard output its pictures, or on standard error why it has none."""

    def __init__(self, progress: Progress, quiet: bool, silent: bool) -> None:
        self._progress = progress
        self._out = sys.stdout
        self._quiet = quiet
        self._silent = silent

    def __call__(self, event: JobEvent) -> None:
        self._progress.count(event)
        if event.what in ("failed", "again"):
            tell(_trouble(event))
        if event.what != "done":
            return
        if not self._silent:
            self._print(event)
        if event.message:
            tell(f"line {event.entry.line}: {event.message}")

    def _print(self, event: JobEvent) -> None:
        pace = "" if self._quiet else f"  {format_time(event.seconds)}; {self._progress.state}; {self._progress.pace}"
        try:
            print("\n".join(event.entry.files) + pace, file=self._out, flush=True)
        except BrokenPipeError:  # whoever read our output has left; the batch goes on
            self._silent = True
            give_up_stdout()


class LiveTable:
    """The same on a terminal, in place."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._running: dict[str, JobEvent] = {}
        self._ended: list[tuple[str, str, str]] = []

    def __call__(self, event: JobEvent) -> None:
        self._progress.count(event)
        if event.what == "begun":
            self._running[event.worker] = event
            return
        self._running.pop(event.worker, None)
        if event.what == "done":
            self._ended.append((", ".join(event.entry.files), format_time(event.seconds), event.message))
        else:
            self._ended.append((f"line {event.entry.line}", event.what, event.message))

    def __rich__(self) -> Group:
        table = Table("", "", "", show_header=False)
        for row in self._ended[-_LAST:]:
            table.add_row(*map(escape, row))
        for worker, event in list(self._running.items()):
            table.add_row(escape(f"{worker}: line {event.entry.line}"), "...", escape(event.entry.job.prompt[:_PROMPT]))
        return Group("; ".join(filter(None, (self._progress.state, self._progress.pace))), table)


def _trouble(event: JobEvent) -> str:
    return f"line {event.entry.line}{', tried again' if event.what == 'again' else ''}: {event.message}"


@contextlib.contextmanager
def show_progress(progress: Progress, *, quiet: bool, silent: bool) -> Iterator[Any]:
    """Yield the function to call with each event: a live table if standard output is a terminal, else lines.

    Args:
        quiet: print only the names of pictures.
        silent: print nothing to standard output.
    """
    console = Console(file=sys.stdout)
    if quiet or silent or not console.is_terminal:
        yield Lines(progress, quiet, silent)
        return
    table = LiveTable(progress)
    with Live(table, console=console, refresh_per_second=2):
        yield table
