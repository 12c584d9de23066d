"""Scatter of the times of equal pictures: many in a row, the first left out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from sd_lowvram import progress

from .pictures import chosen_policies, facts, loaded, timed_pictures, ways
from .tables import Row, Sheet, quiet, written

PUBLISHED = {
    "compvis": (0.156, 0.040),
    "basujindal-turbo": (0.152, 0.023),
    "basujindal": (0.865, 0.041),
    "consciencia-turbo": (0.732, 0.068),
    "consciencia-modified": (0.060, 0.014),
}
"""Standard deviation in seconds and coefficient of variation of 30 pictures of 448x448 on an RTX 2070."""


def _published(number: int, row: Row) -> str:
    return f"{PUBLISHED[row['policy']][number]:.3f}" if row["policy"] in PUBLISHED else ""


lines = Sheet(
    "{runs} pictures in a row",
    "{model}, {size}x{size}, {steps} steps, on {device}, the first picture of each policy left out. Published: SD1.5,"
    " 30 pictures of 448x448 on an RTX 2070.",
    (
        ("policy", "{policy}"),
        ("mean s", quiet("{mean:.4f}")),
        ("deviation s", quiet("{deviation:.4f}")),
        ("variation", quiet("{variation:.4f}")),
        ("published deviation s", functools.partial(_published, 0)),
        ("published variation", functools.partial(_published, 1)),
    ),
).lines


def run(
    model: str | None, names: Sequence[str] = (), *, size: int = 128, steps: int = 8, runs: int = 30, out: Path | None
) -> dict[str, Any]:
    """Measure the policies ``names`` (empty: all that run here); writes ``out`` and JSON beside it."""
    names, left_out = chosen_policies(names)
    pipe = loaded(model)
    prepared = ways(names, model, pipe, size, size, steps)
    rows = []
    for name in progress.counted("policies", names):
        with prepared[name]() as running:
            (seconds,), own = timed_pictures(running, size, size, steps, runs)
        mean, deviation = fmean(seconds), stdev(seconds)
        told = {"mean": mean, "deviation": deviation, "variation": deviation / mean}
        rows.append({"policy": name, **told, "seconds": seconds, "own": own})
    report = facts(model, size=size, steps=steps, runs=runs, left_out=list(left_out), rows=rows)
    return written(report, lines, out)
