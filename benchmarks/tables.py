"""What measurements have in common: the files that they write, and what they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from sd_lowvram.errors import BadInputError
from sd_lowvram.files.whole import write_json, write_whole


def milliseconds(*seconds: float | None) -> list[str]:
    """Cells of a table; None: nothing was measured."""
    return ["" if one is None else f"{1000 * one:.2f}" for one in seconds]


def begun(asked: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """The report beside ``out`` that is not finished yet, or a new one with no ``rows``.

    Raises:
        BadInputError: what is there was asked for in another way.
    """
    file = out.with_suffix(".json") if out is not None else None
    if file is None or not file.is_file():
        return {**asked, "rows": []}
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    other = [name for name in asked if report.get(name) != asked[name]]
    if other:
        told = ", ".join(f"{name} {report.get(name)}" for name in other)
        raise BadInputError(f"{file} was made with {told}: begin anew with another --out")
    return report


def written(
    report: dict[str, Any], lines: Callable[[dict[str, Any]], Iterable[str]], out: Path | None
) -> dict[str, Any]:
    """``report``, also as Markdown in ``out`` where that is given, and as JSON beside it."""
    if out is not None:
        write_json(report, out.with_suffix(".json"))
        write_whole(("\n".join(lines(report)) + "\n").encode(), out)
    return report


def show(report: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print ``report`` as one JSON value, or ``lines``."""
    print(json.dumps(report, indent=2) if as_json else "\n".join(lines))


def eight_bits(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as a file would hold them: whole numbers up to 255."""
    return pixels.clamp(0, 1).mul(255).round()
