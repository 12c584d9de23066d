"""How many pictures a batch makes with several workers and with one, in pairs, one after the other.

Each run is a batch of the demo model by the command line. What its journal says of the time when all workers were at
work counts: from the end of the last worker's first job to the end of the first one's last.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sd_lowvram.errors import LowVRAMError
from sd_lowvram.files.tables import table
from sd_lowvram.progress import counted

from .tables import show

_SIDE, _STEPS = 128, 20
Row = dict[str, float]


def run(where: str, workers: int, jobs: int, pairs: int, as_json: bool) -> list[Row]:
    """Measure and print ``pairs`` rows; ``jobs`` are those of a run by one worker, several do as many each."""
    rows = []
    for _ in counted("pairs", range(pairs)):
        one, many = (_pictures_a_minute(where, count, jobs * count) for count in (1, workers))
        rows.append({"one": one, "many": many, "ratio": many / one})
    show(rows, _lines(where, workers, rows), as_json)
    return rows


def _lines(where: str, workers: int, rows: list[Row]) -> Iterator[str]:
    yield f"Pictures a minute, {_SIDE}x{_SIDE}, {_STEPS} steps, on {where}, {os.cpu_count()} cores, a thread a worker"
    yield from table(
        ("1 worker", f"{workers} workers", "ratio"),
        ([f"{row['one']:.1f}", f"{row['many']:.1f}", f"{row['ratio']:.2f}"] for row in rows),
    )
    yield f"median ratio {statistics.median(row['ratio'] for row in rows):.2f}"


def _pictures_a_minute(where: str, workers: int, jobs: int) -> float:
    with tempfile.TemporaryDirectory(prefix="sd-lowvram-") as name:
        folder = Path(name)
        lines = [json.dumps({"prompt": "a red apple", "seed": seed}) for seed in range(jobs)]
        (folder / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
        size = ["--width", str(_SIDE), "--height", str(_SIDE), "--steps", str(_STEPS)]
        options = ["--out", "out", "--on", where, "--workers", str(workers), "--quiet", *size]
        arguments = [sys.executable, "-m", "sd_lowvram", "batch", "jobs.jsonl", *options]
        # A thread each, so that one worker leaves the other cores to others.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LowVRAMError(f"a batch on {where} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        with contextlib.closing(sqlite3.connect(folder / "out" / "journal.sqlite")) as journal:
            return _rate(journal.execute("SELECT worker, began, seconds FROM attempts").fetchall())


def _rate(attempts: list[tuple[str, float, float]]) -> float:
    """Pictures a minute while all workers were at work."""
    ends: dict[str, list[float]] = {}
    for worker, began, seconds in attempts:
        ends.setdefault(worker, []).append(began + seconds)
    first = max(min(own) for own in ends.values())
    last = min(max(own) for own in ends.values())
    within = sum(first < end <= last for own in ends.values() for end in own)
    return 60 * within / (last - first)
