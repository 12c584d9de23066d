"""Rows of a part, written as they come, so that a later call continues with the missing ones."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.units import GIB

from .. import trial

Case = dict[str, Any]
"""Key of a row: the plain values with which it begins."""
_HOST_BYTES = 6 * GIB
"""Host memory that a trial may need: a pipeline's weights, their pinned copies, and torch itself."""


class ResultRows:
    """The rows of one part.

    Attributes:
        rows: those there are, in the order in which they came.
    """

    def __init__(self, part: str, rows: list[dict[str, Any]], seconds: float, save: Callable[[], None]) -> None:
        self.rows = rows
        self._part = part
        self._end = time.monotonic() + seconds
        self._save = save
        self._lock = threading.Lock()

    def seconds(self) -> float:
        """Seconds that are left for the part."""
        return self._end - time.monotonic()

    def find(self, case: Case) -> dict[str, Any] | None:
        """The row of ``case``, if it has been measured; one for which the time was too short has not."""
        found = (row for row in self.rows if all(row.get(key) == value for key, value in case.items()))
        return next((row for row in found if not row.get("timed_out")), None)

    def add(self, case: Case, row: dict[str, Any]) -> None:
        """Write a row, in place of one for which the time was too short."""
        with self._lock:
            late = [one for one in self.rows if all(one.get(key) == value for key, value in case.items())]
            for one in late:
                self.rows.remove(one)
            self.rows.append(case | row)
            self._save()

    def fill(self, cases: Sequence[Case], measured: Callable[..., Iterator[dict[str, Any]]], **shared: Any) -> None:
        """Measure those of ``cases`` that have no row, by a trial that they share (:func:`trial.measure_each`)."""
        missing = [case for case in cases if self.find(case) is None]
        rows = trial.measure_each(measured, missing, seconds=self.seconds, **shared)
        for case, row in zip(missing, rows, strict=True):
            self.add(case, row)


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


def in_order(rows: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """``rows`` by their ``keys``, whatever the order in which they came."""
    return sorted(rows, key=lambda row: tuple(row[key] for key in keys))
