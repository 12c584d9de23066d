"""Second-order polynomials of the pixels against the seconds of matrices: published, predicted or measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram.errors import BadInputError
from sd_lowvram.files.tables import table

from .fits import polynomial
from .matrix import seconds_by_size, title
from .published import PUBLISHED, Size, published_times
from .tables import written

SMALL = 512 * 512
"""Pixels up to which a picture is small: such ones wait for launches, not for arithmetic."""


def run(files: Sequence[Path] = (), *, out: Path | None) -> dict[str, Any]:
    """Fit the published matrices, and those in ``files``, which ``matrix`` wrote; writes ``out`` and JSON.

    Raises:
        BadInputError: a file that is none of a matrix.
    """
    named = {f"{name}, published": published_times(name) for name in PUBLISHED}
    named |= dict(map(_read, files))
    rows = [_row(name, times) for name, times in named.items()]
    return written({"small_pixels": SMALL, "rows": rows}, lines, out)


def _read(file: Path) -> tuple[str, dict[Size, float]]:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        return title(report), {size: seconds for size, seconds in seconds_by_size(report).items() if seconds}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{file} is no JSON file of python -m benchmarks matrix: {error}") from error


def _row(name: str, times: Mapping[Size, float]) -> dict[str, Any]:
    """Fits through all sizes, the small and the other ones; None where there are too few."""
    parts = {
        "all": times,
        "small": {size: one for size, one in times.items() if size[0] * size[1] <= SMALL},
        "large": {size: one for size, one in times.items() if size[0] * size[1] > SMALL},
    }
    row: dict[str, Any] = {"matrix": name}
    for part, chosen in parts.items():
        fit = polynomial([height * width for height, width in chosen], list(chosen.values()), 2)
        row[part] = fit and {
            "sizes": len(chosen),
            "coefficients": list(fit.coefficients),
            "r_squared": fit.r_squared,
            "megapixel_seconds": fit.at(1e6),
        }
    return row


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The fits as Markdown."""
    yield "# Pixels against time"
    yield ""
    yield (
        "Second-order polynomials s = a + b M + c M^2 of the megapixels M. *Small*: up to 512x512 pixels, fitted apart."
    )
    yield ""
    heads = ("matrix", "sizes", "a", "b", "c", "R^2", "at 1 MP s", "R^2 small", "R^2 others")
    yield from table(heads, (_cells(row) for row in report["rows"]))


def _cells(row: dict[str, Any]) -> list[str]:
    whole = row["all"]
    if whole is None:
        return [row["matrix"], "too few", *[""] * 7]
    factors = [f"{factor * 10 ** (6 * power):.2f}" for power, factor in enumerate(whole["coefficients"])]
    apart = [f"{row[part]['r_squared']:.4f}" if row[part] else "" for part in ("small", "large")]
    told = [f"{whole['r_squared']:.4f}", f"{whole['megapixel_seconds']:.1f}"]
    return [row["matrix"], str(whole["sizes"]), *factors, *told, *apart]
