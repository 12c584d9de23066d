"""The journal of a batch: the state of each job, in an SQLite file in the batch's folder, correct after any crash.

A picture is in its place before the journal marks its job as done. A batch that is interrupted in between makes the
picture again, in the same place. So there is never a result without a picture, and never two results of one job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..commands.inputs import Job
from ..errors import BadInputError, OutputError
from .jobs import Task, comparable, stated_options
from .marks import FinishedPicture, Found

NAME = "journal.sqlite"
_VERSION = 1
_OURS = 0x53444C56
"""SQLite's application_id of a journal of ours: "SDLV"."""

_TABLES = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    line INTEGER,
    options TEXT NOT NULL,
    seed TEXT NOT NULL,
    files TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed')),
    error TEXT
);
CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs, worker TEXT NOT NULL, began REAL NOT NULL, seconds REAL, error TEXT,
    notes TEXT
);
CREATE TABLE results (
    file TEXT PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs, number INTEGER NOT NULL, sha256 TEXT NOT NULL,
    thumbnail BLOB NOT NULL
);
"""


@dataclass(frozen=True)
class JournalEntry:
    """A job with its place in the journal: ``files`` are the names of its pictures, in the batch's folder."""

    id: int
    line: int
    job: Job
    files: tuple[str, ...]


@dataclass
class JobChanges:
    """Differences from the last run, as lines of the file; ``gone`` as lines of the file of that time.

    Without a journal, ``found`` lists the pictures in the folder that belong to jobs of the file.
    """

    first: bool = False
    found: list[str] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    edited: list[str] = field(default_factory=list)


class Journal:
    """The journal of the batch in ``folder``, locked for this process until it is closed.

    A damaged journal is renamed and rebuilt from the pictures.

    Attributes:
        set_aside: path of the damaged journal; None if it was not damaged.

    Raises:
        BadInputError: another process has the journal open, or it cannot be read. OutputError: the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self.set_aside: Path | None = None
        try:
            try:
                self._connect()
            except sqlite3.DatabaseError as error:
                if not is_damaged(error) or not _is_ours(self._path):
                    raise
                self.set_aside = self._path.replace(self._path.with_name(f"{NAME}.damaged"))
                self._connect()
        except sqlite3.Error as error:
            if "locked" in str(error):
                raise BadInputError(
                    f"another batch is at work in {folder}: wait for its end, or give another --out"
                ) from error
            if is_full(error):
                raise OutputError(f"{self._path} cannot be written ({error}): free some space") from error
            raise BadInputError(
                f"{self._path} cannot be used ({error}): move it away, or give another --out"
            ) from error

    def _connect(self) -> None:
        self._rows = sqlite3.connect(self._path, timeout=1, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._rows.close()
            raise

    def _open(self) -> None:
        # Held for as long as this process lives: the system lets go of it whatever ends the process.
        self._rows.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._rows.execute("PRAGMA synchronous = FULL")
        self._rows.execute("BEGIN EXCLUSIVE")
        version, ours = (
            self._rows.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        tables = self._rows.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and (ours != _OURS or version != _VERSION):
            raise BadInputError(
                f"{self._path} is not a journal of this version of sd-lowvram: move it away, or give another --out"
            )
        if not tables:
            for statement in _TABLES.split(";"):
                self._rows.execute(statement)
            self._rows.execute(f"PRAGMA user_version = {_VERSION}")
            self._rows.execute(f"PRAGMA application_id = {_OURS}")
        self._rows.execute("COMMIT")
        verdict = self._rows.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)

    def close(self) -> None:
        """Close the database."""
        self._rows.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Everything in the block is written, or nothing of it."""
        self._rows.execute("BEGIN")
        try:
            yield
            self._rows.execute("COMMIT")
        except BaseException:
            if self._rows.in_transaction:  # SQLite has rolled back by itself if the disk is full
                with contextlib.suppress(sqlite3.Error):  # the next program that opens the journal rolls back
                    self._rows.execute("ROLLBACK")
            raise

    def take_up(self, tasks: Sequence[Task]) -> tuple[list[JournalEntry], JobChanges]:
        """Write down the jobs of this run; returns those that have no result yet, and what differs from the last run.

        A job that ran when the program ended, or that failed, waits again; so does one whose picture is missing. A
        picture that somebody has changed is left as it is.
        """
        with self._transaction():
            rows = {row[0]: row[1:] for row in self._rows.execute("SELECT key, id, line, seed, files FROM jobs")}
            changes = JobChanges(first=not rows)
            changes.gone = self._leave(rows, {task.key for task in tasks})
            self._rows.execute("UPDATE jobs SET state = 'waiting' WHERE state IN ('running', 'failed')")
            self._look_after_pictures(changes)
            names = _Names(self._folder, [name for row in rows.values() for name in json.loads(row[3])])
            names.take(task.name for task in tasks if task.name)
            results = Found(self._folder) if changes.first else None
            entries = []
            for task in tasks:
                if task.key in rows:
                    entry = self._reuse_job(task, rows[task.key])
                elif results is not None and (result := results.take(task, asked_names(task))) is not None:
                    entry = self._adopt_results(task, *result, results)
                    changes.found += entry.files
                else:
                    entry = self._first(task, names)
                    changes.new.append(task.line)
                entries.append(entry)
            done = {row[0] for row in self._rows.execute("SELECT id FROM jobs WHERE state = 'done'")}
        return [entry for entry in entries if entry.id not in done], changes

    def _leave(self, rows: dict[str, Any], wanted: set[str]) -> list[int]:
        """Take jobs that the file has no more out of the batch; the lines at which they stood."""
        left = {row[0]: row[1] for key, row in rows.items() if key not in wanted and row[1] is not None}
        self._rows.executemany("UPDATE jobs SET line = NULL WHERE id = ?", [(number,) for number in left])
        return sorted(left.values())

    def _look_after_pictures(self, changes: JobChanges) -> None:
        query = "SELECT results.file, sha256, job FROM results JOIN jobs ON jobs.id = job WHERE line IS NOT NULL"
        for name, digest, job in self._rows.execute(query).fetchall():
            file = self._folder / name
            if not file.is_file():
                changes.missing.append(name)
                self._rows.execute("DELETE FROM results WHERE file = ?", (name,))
                self._rows.execute("UPDATE jobs SET state = 'waiting' WHERE id = ?", (job,))
            elif _sha256(file.read_bytes()) != digest:
                changes.edited.append(name)
        # A job that is in the file again, after another one has made its pictures.
        self._rows.execute(
            "UPDATE jobs SET state = 'waiting' WHERE state = 'done' AND json_array_length(files) > "
            "(SELECT count(*) FROM results WHERE job = jobs.id)"
        )

    def _reuse_job(self, task: Task, row: tuple[int, int | None, str, str]) -> JournalEntry:
        number, _, seed, files = row
        self._rows.execute("UPDATE jobs SET line = ? WHERE id = ?", (task.line, number))
        job = dataclasses.replace(task.job, seed=int(seed))
        return JournalEntry(number, task.line, job, tuple(json.loads(files)))

    def _first(self, task: Task, names: _Names) -> JournalEntry:
        return self._add_job(task, task.job, names.new_names(task), "waiting")

    def _adopt_results(self, task: Task, seed: int, files: list[str], results: Found) -> JournalEntry:
        """Take up a job whose pictures are there."""
        entry = self._add_job(task, dataclasses.replace(task.job, seed=seed), files, "done")
        self._take_results(entry, map(results.picture, files))
        return entry

    def _add_job(self, task: Task, job: Job, files: list[str], state: str) -> JournalEntry:
        options = json.dumps(stated_options(job), ensure_ascii=False)
        values = (task.key, task.line, options, str(job.seed), json.dumps(files), state)
        row = self._rows.execute(
            "INSERT INTO jobs (key, line, options, seed, files, state) VALUES (?, ?, ?, ?, ?, ?)", values
        )
        return JournalEntry(row.lastrowid or 0, task.line, job, tuple(files))

    def _take_results(self, entry: JournalEntry, pictures: Iterable[FinishedPicture]) -> None:
        for number, (name, picture) in enumerate(zip(entry.files, pictures, strict=True)):
            values = (name, entry.id, number, _sha256(picture.png), picture.thumbnail)
            self._rows.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)", values)

    def begin(self, entry: JournalEntry, worker: str) -> None:
        """Record that ``worker`` has started a job.

        Args:
            entry: the job.
            worker: name of the worker.
        """
        with self._transaction():
            self._rows.execute("UPDATE jobs SET state = 'running' WHERE id = ?", (entry.id,))
            values = (entry.id, worker, time.time())
            self._rows.execute("INSERT INTO attempts (job, worker, began) VALUES (?, ?, ?)", values)

    def record_result(
        self, entry: JournalEntry, pictures: Sequence[FinishedPicture], seconds: float, notes: Sequence[str]
    ) -> None:
        """Record the result of a job.

        Args:
            entry: the job.
            pictures: its pictures, which are in their places.
            seconds: time of the job.
            notes: what happened during the job.
        """
        with self._transaction():
            self._end_attempt(entry, seconds, None, notes)
            self._rows.execute("UPDATE jobs SET state = 'done', error = NULL WHERE id = ?", (entry.id,))
            self._take_results(entry, pictures)

    def record_failure(self, entry: JournalEntry, error: str, *, again: bool) -> None:
        """Record why an attempt failed.

        Args:
            entry: the job.
            error: the message.
            again: True if there will be another attempt.
        """
        with self._transaction():
            self._end_attempt(entry, None, error, ())
            state = "waiting" if again else "failed"
            self._rows.execute("UPDATE jobs SET state = ?, error = ? WHERE id = ?", (state, error, entry.id))

    def _end_attempt(self, entry: JournalEntry, seconds: float | None, error: str | None, notes: Sequence[str]) -> None:
        last = "SELECT max(rowid) FROM attempts WHERE job = ?"
        self._rows.execute(
            f"UPDATE attempts SET seconds = ?, error = ?, notes = ? WHERE rowid = ({last})",
            (seconds, error, "\n".join(notes) or None, entry.id),
        )

    def summary(self) -> list[dict[str, Any]]:
        """Every job of the batch as plain values, in the file's order, with its pictures."""
        return _summary(self._rows)

    def thumbnail(self, file: str) -> bytes:
        """The small JPEG of the picture ``file``."""
        row = self._rows.execute("SELECT thumbnail FROM results WHERE file = ?", (file,)).fetchone()
        return bytes(row[0])


def _summary(rows: sqlite3.Connection) -> list[dict[str, Any]]:
    jobs = rows.execute(
        "SELECT id, line, options, seed, state, error, (SELECT count(*) FROM attempts WHERE job = jobs.id) "
        "FROM jobs WHERE line IS NOT NULL ORDER BY line"
    ).fetchall()
    pictures: dict[int, list[dict[str, Any]]] = {}
    for file, job, digest in rows.execute("SELECT file, job, sha256 FROM results ORDER BY job, number"):
        pictures.setdefault(job, []).append({"file": file, "sha256": digest})
    names = ("line", "options", "seed", "state", "error", "attempts")
    summaries = []
    for number, *values in jobs:
        summary = dict(zip(names, values, strict=True)) | {"pictures": pictures.get(number, [])}
        summaries.append(summary | {"options": json.loads(summary["options"]), "seed": int(summary["seed"])})
    return summaries


def finished_jobs(folder: Path) -> tuple[set[str], list[dict[str, Any]]]:
    """Keys of the finished jobs in the journal of ``folder``, and all its jobs as plain values; empty without a
    journal.

    Nothing is written.

    Raises:
        BadInputError: the journal cannot be read now.
    """
    path = folder / NAME
    if not path.is_file():
        return set(), []
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1)) as rows:
            return {row[0] for row in rows.execute("SELECT key FROM jobs WHERE state = 'done'")}, _summary(rows)
    except sqlite3.Error as error:
        why = "the batch itself makes a new one from the pictures that are there"
        why = why if is_damaged(error) else "another batch may be at work in it"
        raise BadInputError(f"{path} cannot be read now ({error}): {why}") from error


def is_damaged(error: sqlite3.Error) -> bool:
    """True if SQLite reports a damaged file; it reports a full disk differently."""
    return type(error) is sqlite3.DatabaseError


def is_full(error: sqlite3.Error) -> bool:
    """True if SQLite could not write: the disk is full, or the file has the largest size that is allowed."""
    return isinstance(error, sqlite3.OperationalError) and any(word in str(error) for word in ("is full", "disk I/O"))


def _is_ours(path: Path) -> bool:
    """True if a possibly damaged file begins like our journal."""
    with path.open("rb") as file:
        head = file.read(100)
    return head.startswith(b"SQLite format 3\0") and head[68:72] == _OURS.to_bytes(4, "big")


def asked_names(task: Task) -> list[str] | None:
    """The names of a job's pictures, where it asks for one."""
    if task.name is None:
        return None
    path = Path(task.name)
    many = [path.with_name(f"{path.stem}-{n}{path.suffix}") for n in range(1, task.job.batch + 1)]
    return [path.as_posix() for path in (many if task.job.batch > 1 else [path])]


class _Names:
    """Free names for pictures: numbered on from all that there are, in the folder and in the journal."""

    def __init__(self, folder: Path, taken: Sequence[str]) -> None:
        self._folder = folder
        self._taken = {comparable(name) for name in taken}
        there = [file.name for file in folder.glob("*.png")]
        numbers = [int(match[1]) for name in (*taken, *there) if (match := re.match(r"(\d+)-", name))]
        self._next = max(numbers, default=-1) + 1
        self._known = frozenset(self._taken)

    def take(self, names: Iterator[str]) -> None:
        """Leave these to the jobs that ask for them."""
        self._taken |= {comparable(name) for name in names}

    def new_names(self, task: Task) -> list[str]:
        """Names for the pictures of a new job.

        Raises:
            BadInputError: the job asks for one that is there and is not of this batch.
        """
        names = asked_names(task)
        if names is None:
            return [self._free_name(task.job, number) for number in range(task.job.batch)]
        for name in names:
            if comparable(name) not in self._known and (self._folder / name).exists():
                raise BadInputError(
                    f"line {task.line}: the output {name} is in {self._folder} already and not of this batch: give "
                    "another name"
                )
        return names

    def _free_name(self, job: Job, number: int) -> str:
        while True:
            name = f"{self._next:05d}-{((job.seed or 0) + number) % 2**64}.png"
            self._next += 1
            if name not in self._taken:
                return name


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
