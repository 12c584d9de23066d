"""The whole of a batch: jobs are checked, brought into the journal, given to a crew, and shown in the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import doors
from ..commands.inputs import Job
from ..commands.interrupts import terminated_as_interrupted
from ..commands.streams import note, tell
from ..errors import BadInputError, OutputError
from ..files import sweep
from ..saved_latents.interval import Interval
from ..units import format_time
from .alike import pictures_by_line
from .checks import check_files, check_names, check_place
from .crew import Alone, Crew
from .driver import unwritable, work
from .jobs import Task, read_jobs
from .journal import NAME as JOURNAL
from .journal import JobChanges, Journal, finished_jobs, is_damaged, is_full
from .latents import tidy
from .processes import Processes, places
from .progress import Progress, show_progress
from .sheet import NAME, write_sheet

_NAMED = 8
"""Lines or files that a note names."""


@dataclass(frozen=True)
class Wanted:
    """Options of a batch in addition to its jobs."""

    jobs: Path
    out: Path
    on: str | None
    workers: int | None
    interval: Interval
    retries: int
    stop_on_error: bool
    as_json: bool
    quiet: bool


def check(wanted: Wanted, base: Job, chosen: dict[str, Any]) -> list[Task]:
    """The jobs of the file, each of which can be begun. Arguments as for :func:`read_jobs`.

    Raises:
        LowVRAMError: one cannot; the message names its line.
    """
    tasks = read_jobs(wanted.jobs, base, chosen)
    for task in tasks:
        if wanted.on is not None and task.job.device is not None:
            raise BadInputError(f"line {task.line}: device and --on {wanted.on} exclude each other: leave one out")
    check_names(wanted.out, tasks)
    check_files(tasks, here=wanted.on is None or not wanted.on.startswith("ray://"))
    return tasks


def run(tasks: Sequence[Task], wanted: Wanted) -> int:
    """Run the jobs without a result and report how they ended; return the exit code of the first job that failed."""
    try:
        check_place(wanted.out)
    except OutputError:
        done, jobs = finished_jobs(wanted.out)
        if not {task.key for task in tasks} <= done:
            raise
        return _report_end(Progress([], len(tasks)), JobChanges(), jobs, wanted)
    with _report_journal(wanted.out), contextlib.closing(Journal(wanted.out)) as journal:
        sweep(wanted.out)  # nobody else is at work here: the journal is this process's
        if journal.set_aside is not None:
            note(f"{wanted.out / JOURNAL} was damaged and lies in {journal.set_aside.name}: a new one is started")
        entries, changes = journal.take_up(tasks)
        _tell_changes(changes, wanted.jobs, len(tasks) - len(entries))
        progress = Progress(entries, len(tasks) - len(entries))
        try:
            if entries:
                with (
                    terminated_as_interrupted(),
                    show_progress(progress, quiet=wanted.quiet, silent=wanted.as_json) as tell_of,
                    _crew(wanted) as crew,
                ):
                    pictures = pictures_by_line(tasks, crew.size)
                    work(
                        entries, crew, journal, wanted.out, tell_of, interval=wanted.interval, pictures=pictures,
                        retries=wanted.retries, stop_on_error=wanted.stop_on_error,
                    )  # fmt: skip
        except BaseException as error:
            if isinstance(error, OutputError) or not isinstance(error, BadInputError):
                note(f"{progress.state}; the same command continues from here")
            with contextlib.suppress(OSError, sqlite3.Error):  # on a full disk: what ended the batch is reported
                _leave(wanted, journal)
            raise
        try:
            _leave(wanted, journal)
        except OSError as error:
            raise unwritable(wanted.out / NAME, error) from error
        return _report_end(progress, changes, journal.summary(), wanted)


def _leave(wanted: Wanted, journal: Journal) -> None:
    """Leave the folder in order: the contact sheet, and no temporary files."""
    tidy(wanted.out)
    write_sheet(wanted.out, wanted.jobs.stem, journal)


@contextlib.contextmanager
def _report_journal(folder: Path) -> Iterator[None]:
    """Turn damage of the journal during the batch into BadInputError, and a full disk into OutputError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_full(error):
            raise OutputError(f"{folder / JOURNAL} cannot be written ({error}): free some space") from error
        if not is_damaged(error):
            raise
        raise BadInputError(f"{folder / JOURNAL} is damaged ({error}): the same command begins a new one") from error


@contextlib.contextmanager
def _crew(wanted: Wanted) -> Iterator[Crew]:
    """Start the crew for the time of the block."""
    crew: Crew
    if wanted.on is None:
        crew = Alone()
    elif wanted.on == "local":
        crew = Processes(places(wanted.workers))
    elif wanted.on in doors.CREWS:
        crew = doors.CREWS[wanted.on](wanted.workers)
    else:
        from .over_ray import Actors

        crew = Actors(wanted.on, wanted.workers)
    with contextlib.closing(crew):
        yield crew


def _tell_changes(changes: JobChanges, jobs: Path, done: int) -> None:
    """Report differences from the last run, if there was one."""
    if changes.found:
        note(f"found, and taken up without a journal: {_name_some(changes.found)}")
    if changes.first:
        return
    if done:
        note(f"{done} jobs are done")
    if changes.new:
        note(f"new in {jobs}: {_lines(changes.new)}")
    if changes.gone:
        note(f"gone from {jobs}: what was {_lines(changes.gone)}; their pictures stay")
    if changes.missing:
        note(f"missing, and made again: {_name_some(changes.missing)}")
    if changes.edited:
        note(f"changed since, and left as they are: {_name_some(changes.edited)}; delete one to have it made again")


def _lines(numbers: Sequence[int]) -> str:
    return f"line{'s' if len(numbers) > 1 else ''} {_name_some(numbers)}"


def _name_some(things: Sequence[object]) -> str:
    more = f" and {len(things) - _NAMED} more" if len(things) > _NAMED else ""
    return ", ".join(map(str, things[:_NAMED])) + more


def _report_end(progress: Progress, changes: JobChanges, jobs: list[dict[str, Any]], wanted: Wanted) -> int:
    """Report how the batch ended; return the exit code of the first job that failed."""
    if wanted.as_json:
        summary: dict[str, Any] = {"folder": str(wanted.out), "sheet": NAME, "seconds": round(progress.seconds, 3)}
        summary |= {"pictures_an_hour": round(progress.pictures_an_hour, 1), **dataclasses.asdict(changes)}
        print(json.dumps(summary | {"jobs": jobs}, indent=2))
    elif not wanted.quiet:
        print(f"{progress.state} in {format_time(progress.seconds)}; all at a glance: {wanted.out / NAME}")
    if not progress.failed:
        return 0
    first = progress.failed[0]
    tell(f"{len(progress.failed)} jobs failed, the first at line {first.entry.line}: {first.message}")
    return first.code
