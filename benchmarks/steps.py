"""Seconds of a picture by its steps: a line, whose slope is a step and whose intercept is all else."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram import progress
from sd_lowvram.devices.info import default_device
from sd_lowvram.devices.pairs import CallTime, timed
from sd_lowvram.files.tables import table

from .fits import polynomial
from .pictures import chosen_policies, facts, loaded, picture, ways
from .tables import BUSY, left_out, trusted, written

COUNTS = tuple(range(10, 101, 10))
_LEAST_R_SQUARED = 0.9


def run(
    model: str | None, names: Sequence[str] = (), *, size: int = 128, counts: Sequence[int] = COUNTS, out: Path | None
) -> dict[str, Any]:
    """Measure the policies ``names`` (empty: all that run here), in turn at every count; writes ``out`` and JSON."""
    names, left_out = chosen_policies(names)
    pipe = loaded(model)
    prepared = ways(names, model, pipe, size, size, max(counts))
    times: dict[str, list[CallTime]] = {name: [] for name in names}
    for count in progress.counted("counts of steps", counts):
        for name in names:
            with prepared[name]() as running:
                picture(running, size, size, 1)
                drawn = functools.partial(picture, running, size, size, count)
                times[name].append(timed(drawn, default_device())[0])
    rows = [_row(name, counts, times[name]) for name in names]
    report = facts(model, size=size, counts=list(counts), left_out=list(left_out), rows=rows)
    return written(report, lines, out)


def _row(name: str, counts: Sequence[int], times: Sequence[CallTime]) -> dict[str, Any]:
    seconds, own = [one.seconds for one in times], min(one.own for one in times)
    line = polynomial(counts, seconds, 1)
    assert line is not None
    (intercept, slope), r_squared = line.coefficients, line.r_squared
    return {
        "policy": name, "slope": slope, "intercept": intercept, "r_squared": r_squared, "seconds": seconds, "own": own,
    }  # fmt: skip


def is_line(row: dict[str, Any]) -> bool:
    """True if a row's times are on a line, and no other program disturbed them."""
    return trusted(row) and row["r_squared"] >= _LEAST_R_SQUARED


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The measurement as Markdown."""
    counts = report["counts"]
    yield "# Seconds by steps"
    yield ""
    yield (
        f"{report['model']}, {report['size']}x{report['size']}, {counts[0]} to {counts[-1]} steps, on "
        f"{report['device']}, the policies in turn. A line through the times: its slope is a step, its intercept all "
        f"else; not told where R^2 is below {_LEAST_R_SQUARED}."
    )
    yield ""
    yield from table(("policy", "ms a step", "ms besides", "R^2", *map(str, counts)), map(_cells, report["rows"]))
    yield from left_out(report["left_out"])


def _cells(row: dict[str, Any]) -> list[str]:
    why = "not told: no line" if trusted(row) else BUSY
    line = [f"{1000 * row[name]:.1f}" if is_line(row) else why for name in ("slope", "intercept")]
    return [row["policy"], *line, f"{row['r_squared']:.4f}", *(f"{one:.2f}" for one in row["seconds"])]
