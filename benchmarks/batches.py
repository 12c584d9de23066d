"""Pictures a second of a batch with several workers and with one, in pairs, one after the other.

Each run is a batch of the demo model by the command line. Its journal shows the time when all workers were running,
which counts: from the end of the last worker's first job to the end of the first one's last.
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
from typing import Any

from sd_lowvram.devices.pairs import spread
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.files.tables import table
from sd_lowvram.progress import counted

from .tables import BUSY, MOST_SPREAD, figure, written

_SIDE, _STEPS = 128, 20
Row = dict[str, float]


def run(where: str, workers: int, jobs: int, pairs: int, out: Path | None = None) -> dict[str, Any]:
    """Measure ``pairs`` rows; ``jobs`` are those of a run by one worker, several do as many each."""
    rows = []
    for _ in counted("pairs", range(pairs)):
        one, many = (_pictures_a_minute(where, count, jobs * count) for count in (1, workers))
        rows.append({"one": one, "many": many, "ratio": many / one})
    return written({"on": where, "workers": workers, "jobs": jobs, "rows": rows}, lines, out)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The table as Markdown."""
    rows = report["rows"]
    yield "# Pictures a minute by several workers"
    yield ""
    yield f"{_SIDE}x{_SIDE}, {_STEPS} steps, on {report['on']}, {os.cpu_count()} cores, a thread a worker."
    yield ""
    yield from table(
        ("1 worker", f"{report['workers']} workers", "ratio"),
        ([f"{row['one']:.1f}", f"{row['many']:.1f}", f"{row['ratio']:.2f}"] for row in rows),
    )
    yield ""
    ratios = [row["ratio"] for row in rows]
    told = figure(statistics.median(ratios), spread(ratios), "{:.2f}")
    yield f"Median ratio: {told if (spread(ratios) or 0) <= MOST_SPREAD else BUSY}."


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
