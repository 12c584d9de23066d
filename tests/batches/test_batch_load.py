"""Batches under load: kills and full disks at drawn moments, two batches on one folder, clocks that go back.

``python -m pytest -s tests/batches/test_batch_load.py`` prints the rows of docs/batches.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from batch_runs import WARM, jobs, results
from command_line import ENVIRONMENT, MAIN, ROOT, command
from forked import forks_of
from test_batch_workers import WHERE, workers_of

IN_EACH_PROCESS = """
import errno, os, sqlite3, stat, time
start, now, fsync, connect = time.monotonic(), time.time, os.fsync, sqlite3.connect
time.time = lambda: now() - 3600 * (time.monotonic() - start)
if "FULL_AFTER" in os.environ:
    left = int(os.environ["FULL_AFTER"])
    def full(handle):
        global left
        about = os.fstat(handle)
        if stat.S_ISREG(about.st_mode):
            left -= about.st_size
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fsync(handle)
    def bounded(*args, **kwargs):
        rows = connect(*args, **kwargs)
        rows.execute("PRAGMA max_page_count = 1")
        return rows
    os.fsync = full
    if left % 2:
        sqlite3.connect = bounded
"""
"""The clock goes back an hour a second. FULL_AFTER: no file can be written after so many bytes, and if they are odd the
journal, which SQLite writes, cannot grow.
"""

SAYS = {"full": "cannot be written", "head": "Ray cluster"}
FROM_HERE = "the same command continues from here"


class Load:
    """A batch with its faults.

    Args:
        folder: an empty one.
        where: local or ray.
        count: number of jobs.
        faults: kinds of faults, in any order.
        seed: draws their order and moments.
    """

    def __init__(self, folder: Path, where: str, count: int, faults: list[str], seed: int) -> None:
        self._chance = random.Random(seed)
        self.folder, self.where = folder, where
        self._faults = self._chance.sample(faults, len(faults))
        self._arguments = command("batch", jobs(folder, count), "--out", "out", "--on", where, "--workers", 2, "--json")
        (folder / "sitecustomize.py").write_text(IN_EACH_PROCESS)
        self._temporary = tempfile.mkdtemp(prefix="load-", dir="/tmp")  # sockets of Ray have short names
        self.seen: Counter[str] = Counter()

    def run(self) -> str:
        """Repeat the command until it ends by itself with all jobs done; return what it printed."""
        try:
            while True:
                full = self._faults[:1] == ["full"]
                bytes_left = self._chance.randint(20_000, 120_000)
                code, out, err = self._once({"FULL_AFTER": str(bytes_left)} if full else {})
                if code == 0:
                    assert not self._faults, (self._faults, "more jobs, for the faults that are left")
                    return out
                assert code in (1, 2, 130, -9), err
                if full:
                    assert code == 2 and SAYS["full"] in err and FROM_HERE in err, err
                    self._faults.pop(0)
                    self.seen["full"] += 1
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _once(self, more: dict[str, str]) -> tuple[int, str, str]:
        path = os.pathsep.join((str(self.folder), str(ROOT)))
        environment = ENVIRONMENT | {"PYTHONPATH": path, "TMPDIR": self._temporary} | more
        process = self._begin(environment)
        if not more and self._chance.random() < 0.5:
            process = self._refuse_one(process, self._begin(environment))
        try:
            while self._faults and self._faults[0] != "full" and process.poll() is None:
                kind = self._faults[0]
                if self._await_moment(process) and self._kill(kind, process):
                    self._faults.pop(0)
                    self.seen[kind] += 1
                if kind != "worker":
                    break
            if self._faults[:1] == ["full"] and not more:  # the next run has it
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=400)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if process.returncode == 130:
            self.seen["interrupted"] += 1
        if process.returncode in (1, 130):
            assert FROM_HERE in err and (process.returncode == 130 or SAYS["head"] in err), err
        return process.returncode, out, err

    def _begin(self, environment: dict[str, str]) -> subprocess.Popen:
        streams: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self._arguments, cwd=self.folder, env=environment, **streams)

    def _refuse_one(self, *both: subprocess.Popen) -> subprocess.Popen:
        """Return the one that has the folder, of two that began at once."""
        while all(process.poll() is None for process in both):
            time.sleep(0.05)
        refused = next(process for process in both if process.poll() is not None)
        _, err = refused.communicate()
        assert refused.returncode == 2 and "another batch is at work" in err, err
        self.seen["refused"] += 1
        return both[1] if refused is both[0] else both[0]

    def _await_moment(self, process: subprocess.Popen) -> bool:
        """Wait for a drawn moment of the work, or now and then of the start; False if the batch has ended before."""
        working = self._chance.random() < 0.75
        enough = self._pictures() + self._chance.randint(1, 4)
        while process.poll() is None and not self._workers(process):
            time.sleep(0.1)
        while working and self._pictures() < enough and process.poll() is None:
            time.sleep(0.01)
        time.sleep(self._chance.random() / 2)
        return process.poll() is None

    def _pictures(self) -> int:
        return len(list((self.folder / "out").glob("*.png")))

    def _kill(self, kind: str, process: subprocess.Popen) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if kind == "driver":
                process.kill()
                return True
            found = self._workers(process) if kind == "worker" else self._heads(process)
            self._chance.choice(found).kill()
            return True
        return False

    def _workers(self, process: subprocess.Popen) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return workers_of(process, self.where)
        return []

    def _heads(self, process: subprocess.Popen) -> list[psutil.Process]:
        return [one for one in psutil.Process(process.pid).children() if one.name() in ("gcs_server", "raylet")]

    def left(self) -> list[str]:
        """Processes that still work in the folder, a little later."""
        end = time.monotonic() + 30
        while found := list(self._processes()):
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        return found

    def _processes(self):
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.cwd() == str(self.folder) and one.status() != psutil.STATUS_ZOMBIE:
                    yield " ".join(one.cmdline())


def row_of(load: Load, out: str, undisturbed: dict[str, str]) -> dict[str, int]:
    """Count what was lost, doubled, changed or left over, and how often the jobs began."""
    folder = load.folder / "out"
    summary, made = json.loads(out)["jobs"], results(out)
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as rows:
        finished = Counter(job for (job,) in rows.execute("SELECT job FROM attempts WHERE seconds IS NOT NULL"))
    return {
        "lost": len(undisturbed.keys() - made.keys()) + sum(job["state"] != "done" for job in summary),
        "doubled": len(made.keys() - undisturbed.keys()) + sum(finished.values()) - len(finished),
        "changed": sum(undisturbed[name] != digest for name, digest in made.items() if name in undisturbed),
        "left over": len(files - made.keys() - {"journal.sqlite", "index.html"}) + len(load.left()),
        "begun": sum(job["attempts"] for job in summary),
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[int], dict[str, str]]:
    """Checksums of so many jobs in one process that nobody disturbs."""

    def made(count: int) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("undisturbed")
        with forks_of(WARM, ENVIRONMENT) as run:
            done = run(MAIN, "batch", jobs(folder, count), "--out", "out", "--json", folder=folder)
        assert done.returncode == 0, done.stderr
        return results(done.stdout)

    return made


KILLS = {"local": {"worker": 6, "driver": 6}, "ray": {"worker": 5, "driver": 4, "head": 3}}


def no_trace_is_left_of(load: Load, undisturbed: dict[str, str]) -> None:
    """Run a batch under load; compare its pictures, and what is in its folder, with a batch that nobody disturbs."""
    row = row_of(load, load.run(), undisturbed)
    print({"where": load.where, **load.seen, **row})
    assert not any(row[what] for what in ("lost", "doubled", "changed", "left over"))


@pytest.mark.slow(40)
def test_two_kills(undisturbed, tmp_path):
    load = Load(tmp_path, "local", 12, ["worker", "driver"], seed=49)
    no_trace_is_left_of(load, undisturbed(12))
    assert load.seen["worker"] == load.seen["driver"] == 1


@pytest.mark.rare
@pytest.mark.slow(400)
@pytest.mark.parametrize("where", WHERE)
def test_two_hundred_jobs_under_load(undisturbed, tmp_path, where):
    faults = {"full": 3, **KILLS[where]}
    load = Load(tmp_path, where, 200, list(Counter(faults).elements()), seed=49)
    no_trace_is_left_of(load, undisturbed(200))
    assert {kind: load.seen[kind] for kind in faults} == faults and load.seen["refused"]
