"""Goes through the jobs of a batch: gives them to workers, puts pictures in their places, and writes the journal."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..commands.interrupts import heed_interrupts
from ..errors import LowVRAMError, OutputError
from ..files import write_whole
from ..saved_latents.interval import Interval
from .checks import inside
from .crew import Crew, Lost
from .journal import Journal, JournalEntry
from .latents import place_in, remove
from .painter import Failed, Painted, model_key, plan_key

_MOST_LOST = 3
"""Workers that may end over one job, before it is taken for the cause."""


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job: ``what`` it was, and where."""

    what: Literal["begun", "done", "failed", "again"]
    entry: JournalEntry
    worker: str
    seconds: float = 0.0
    message: str = ""
    code: int = 0


class _Queue:
    """Jobs that wait: those of one model after each other, and of these those of one shape."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        models: dict[Any, dict[Any, list[JournalEntry]]] = {}
        for entry in entries:
            models.setdefault(model_key(entry.job), {}).setdefault(plan_key(entry.job), []).append(entry)
        self._waiting = [entry for shapes in models.values() for alike in shapes.values() for entry in alike]
        self._last: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, worker: str) -> JournalEntry:
        """The next job for ``worker``: of the shape for which it has its plan, if there is one left."""
        last = self._last.get(worker)
        place = next((place for place, entry in enumerate(self._waiting) if _shape(entry) == last), 0)
        entry = self._waiting.pop(place)
        self._last[worker] = _shape(entry)
        return entry

    def put_back(self, entry: JournalEntry) -> None:
        """Put a job at the end, behind those that have not been tried."""
        self._waiting.append(entry)


def _shape(entry: JournalEntry) -> Any:
    return model_key(entry.job), plan_key(entry.job)


def work(
    entries: Iterable[JournalEntry],
    crew: Crew,
    journal: Journal,
    folder: Path,
    tell: Callable[[JobEvent], None],
    *,
    interval: Interval,
    pictures: Mapping[int, int],
    retries: int = 0,
    stop_on_error: bool = False,
) -> None:
    """Paint ``entries`` with ``crew``; each result is in ``folder`` and in the journal before ``tell`` reports it.

    Args:
        pictures: for each line of the file, the number of pictures that the job's plan makes in all.
        interval: interval at which a job's latents are written, for resuming it.
        retries: number of retries of a failed job.
        stop_on_error: start no more jobs after one that failed finally; running ones are waited for.

    Raises:
        OutputError: a picture cannot be saved (a full disk, say); its job is not done in the journal.
        LowVRAMError: no worker is left.
    """
    queue = _Queue(entries)
    running: dict[str, JournalEntry] = {}
    chances = _Chances(retries)
    stopped = False
    while running or (queue and not stopped):
        heed_interrupts()
        for worker in crew.idle():
            if queue and not stopped:
                entry = queue.take(worker)
                journal.begin(entry, worker)
                tell(JobEvent("begun", entry, worker))
                place = place_in(folder, entry.id, interval)
                crew.give(worker, entry.job, place, pictures[entry.line])
                running[worker] = entry
        for worker, outcome in crew.wait():
            entry = running.pop(worker)
            if isinstance(outcome, Painted):
                for name, picture in zip(entry.files, outcome.pictures, strict=True):
                    _save(picture.png, inside(folder, name))
                journal.record_result(entry, outcome.pictures, outcome.seconds, outcome.notes)
                remove(place_in(folder, entry.id, interval))
                tell(JobEvent("done", entry, worker, outcome.seconds, "; ".join(outcome.notes)))
                continue
            again, message, code = chances.judge(entry, outcome)
            journal.record_failure(entry, message, again=again)
            tell(JobEvent("again" if again else "failed", entry, worker, 0.0, message, code))
            if again:
                queue.put_back(entry)
            stopped = stopped or (stop_on_error and not again)


def _save(png: bytes, place: Path) -> None:
    """Write a picture whole. Unlike ``generate``, save it nowhere else if that fails: the job runs again."""
    try:
        write_whole(png, place.resolve())
    except OSError as error:
        raise unwritable(place, error) from error


def unwritable(place: Path, error: OSError) -> OutputError:
    """Error for a file of the batch that could not be written."""
    remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "make it writable"
    return OutputError(f"{place} cannot be written ({(error.strerror or str(error)).lower()}): {remedy}")


class _Chances:
    """Number of failures of each job, and of deaths of its worker."""

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._failures: Counter[int] = Counter()
        self._losses: Counter[int] = Counter()

    def judge(self, entry: JournalEntry, outcome: Failed | Lost) -> tuple[bool, str, int]:
        """Return if the job is retried, the reason for the missing result, and its exit code."""
        if isinstance(outcome, Lost):
            self._losses[entry.id] += 1
            return self._losses[entry.id] < _MOST_LOST, outcome.why, LowVRAMError.exit_code
        self._failures[entry.id] += 1
        return self._failures[entry.id] <= self._retries, outcome.message, outcome.code
