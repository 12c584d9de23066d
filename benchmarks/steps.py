"""Seconds of a picture by its steps: a line, whose slope is a step and whose intercept is all else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram import progress
from sd_lowvram.files.tables import table

from .fits import polynomial
from .pictures import chosen_policies, facts, loaded, seconds_of, ways
from .tables import written

COUNTS = tuple(range(10, 101, 10))


def run(
    model: str | None, names: Sequence[str] = (), *, size: int = 128, counts: Sequence[int] = COUNTS, out: Path | None
) -> dict[str, Any]:
    """Measure the policies ``names`` (empty: all that run here), in turn at every count; writes ``out`` and JSON."""
    names, left_out = chosen_policies(names)
    pipe = loaded(model)
    prepared = ways(names, model, pipe, size, size, max(counts))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for count in progress.counted("counts of steps", counts):
        for name in names:
            with prepared[name]() as running:
                seconds_of(running, size, size, 1)
                seconds[name].append(seconds_of(running, size, size, count))
    rows = [_row(name, counts, seconds[name]) for name in names]
    report = facts(model, size=size, counts=list(counts), left_out=list(left_out), rows=rows)
    return written(report, lines, out)


def _row(name: str, counts: Sequence[int], seconds: list[float]) -> dict[str, Any]:
    line = polynomial(counts, seconds, 1)
    assert line is not None
    intercept, slope = line.coefficients
    return {"policy": name, "slope": slope, "intercept": intercept, "r_squared": line.r_squared, "seconds": seconds}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The measurement as Markdown."""
    counts = report["counts"]
    yield "# Seconds by steps"
    yield ""
    yield (
        f"{report['model']}, {report['size']}x{report['size']}, {counts[0]} to {counts[-1]} steps, on "
        f"{report['device']}, the policies in turn. A line through the times: its slope is a step, its intercept all "
        "else. Written by `python -m benchmarks steps`."
    )
    yield ""
    yield from table(("policy", "ms a step", "ms besides", "R^2", *map(str, counts)), map(_cells, report["rows"]))
    if report["left_out"]:
        yield ""
        yield f"Left out, as they need an accelerator: {', '.join(report['left_out'])}."


def _cells(row: dict[str, Any]) -> list[str]:
    line = [f"{1000 * row['slope']:.1f}", f"{1000 * row['intercept']:.1f}", f"{row['r_squared']:.4f}"]
    return [row["policy"], *line, *(f"{one:.2f}" for one in row["seconds"])]
