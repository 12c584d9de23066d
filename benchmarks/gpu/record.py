"""Rows of a part, written as they come, so that a later call continues with the missing ones."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.units import GIB

from .. import trial
from ..h100_steps import WITHIN

Case = dict[str, Any]
"""Key of a row: the plain values with which it begins."""
_HOST_BYTES = 6 * GIB
"""Host memory that a trial may need: a pipeline's weights, their pinned copies, and torch itself."""


class ResultRows:
    """The rows of one part, each with the commit by which it was measured.

    Attributes:
        rows: those there are, in the order in which they came. Rows of other commits stay until they are measured anew.
        folder: where results are written.
    """

    def __init__(
        self, rows: list[dict[str, Any]], seconds: float, save: Callable[[], None], commit: str, folder: Path
    ) -> None:
        self.rows = rows
        self.folder = folder
        self._commit = commit
        self._end = time.monotonic() + seconds
        self._save = save
        self._lock = threading.Lock()

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Rows of this commit for which the time was not too short."""
        return [row for row in self.rows if row.get("commit") == self._commit and not row.get("timed_out")]

    def seconds(self) -> float:
        """Seconds that are left for the part."""
        return self._end - time.monotonic()

    def find(self, case: Case) -> dict[str, Any] | None:
        """The row of ``case``, if it has been measured by this commit and the time was not too short for it."""
        return next((row for row in self.measured if is_of(row, case)), None)

    def add(self, case: Case, row: dict[str, Any]) -> None:
        """Write a row in place of earlier ones. If the time was too short, figures of another commit stay with it."""
        with self._lock:
            for one in [one for one in self.rows if is_of(one, case)]:
                if one.get("timed_out") or not row.get("timed_out"):
                    self.rows.remove(one)
            self.rows.append(case | {"commit": self._commit} | row)
            self._save()

    def drop_earlier(self) -> None:
        """Drop rows of other commits, if the time was enough for all rows: no case asks for these any more."""
        if not any(row.get("timed_out") for row in self.rows):
            self.rows[:] = self.measured
            self._save()

    def fill(self, cases: Sequence[Case], measured: Callable[..., Iterator[dict[str, Any]]], **shared: Any) -> None:
        """Measure those of ``cases`` that have no row, by a trial that they share (:func:`trial.measure_each`)."""
        missing = [case for case in cases if self.find(case) is None]
        rows = trial.measure_each(measured, missing, seconds=self.seconds, **shared)
        for case, row in zip(missing, rows, strict=True):
            self.add(case, row)


def is_of(row: dict[str, Any], case: Case) -> bool:
    """True if ``row`` has the key ``case``."""
    return all(row.get(key) == value for key, value in case.items())


def side_by_side(part: str, work: Callable[[Any], None], things: Sequence[Any], at_once: int) -> None:
    """``work`` on each of ``things``, so many at once, with a report after each."""
    done = 0

    def one(thing: Any) -> None:
        nonlocal done
        work(thing)
        done += 1
        progress.report(part, done, len(things))

    progress.report(part, 0, len(things))
    with ThreadPoolExecutor(at_once) as pool:
        # each in a copy of this context, which knows who listens for progress
        waiting = [pool.submit(contextvars.copy_context().run, one, thing) for thing in things]
        for each in waiting:
            each.result()


def room_for(device: torch.device, nbytes: int) -> int:
    """Number of trials of ``nbytes`` that fit on the device at once, if their times are not compared."""
    import psutil

    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    host = int(psutil.virtual_memory().available)
    return max(1, min(8, os.cpu_count() or 1, free // nbytes, host // _HOST_BYTES))


def not_run(rows: Iterable[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """Names and reasons of the ``rows`` that could not run on this machine (``failed`` is a sentence)."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if isinstance(why := row.get("failed"), str):
            by_reason.setdefault(" ".join(why.split()), []).append(name(row))
    for why, names in by_reason.items():
        yield f"**not run here**: {'; '.join(dict.fromkeys(names))}: {why}"


def fallen(claims: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """Sentence on each of ``claims`` that does not hold."""
    for claim, holds in claims:
        if not holds:
            yield f"**does not hold**: {claim}"


def predicted_step(plan: Any) -> dict[str, float]:
    """Seconds of a denoising step as ``plan`` predicts them, and those of the host and of the device in it."""
    stage = next(stage for stage in plan.stages if stage.name == "denoise")
    clocks = {"step": stage.seconds, "host": stage.host_seconds, "device": stage.device_seconds}
    return {f"predicted_{name}_seconds": seconds / plan.request.steps for name, seconds in clocks.items()}


def as_predicted(name: str, seconds: float, predicted: float) -> tuple[str, bool]:
    """Claim that ``seconds`` are near the predicted ones, and True if it holds."""
    claim = f"{name}: {1000 * seconds:.1f} ms, predicted {1000 * predicted:.1f}"
    return claim, abs(predicted / seconds - 1) <= WITHIN


def in_order(rows: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """``rows`` by their ``keys``, whatever the order in which they came."""
    return sorted(rows, key=lambda row: tuple(row[key] for key in keys))
