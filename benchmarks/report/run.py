"""Measures what lacks and writes the page after every part, so that it can be ended and gone on with at any time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sd_lowvram.errors import BadInputError
from sd_lowvram.files.whole import write_json, write_whole

from ..pictures import facts
from .page import drawn, markdown, page
from .parts import Measurement, parts


def run(folder: Path, quick: bool, say: Callable[[str], None], program: Any, known: Path | None = None) -> Path:
    """Fill ``folder``, and return its ``index.html``; what was measured there before by the same version is kept.

    Args:
        say: told what is left and about how long it takes.
        program: typer's group of the commands that measure.
        known: a folder with JSON that the parts' commands wrote; what it holds is not measured anew.

    Raises:
        BadInputError: the folder holds a report of another kind, machine or version, or ``known`` is no folder.
    """
    every, about = parts(quick), {**facts(None), "quick": quick}
    data = folder / "parts"
    data.mkdir(parents=True, exist_ok=True)
    _check(data / "about.json", about)
    if known is not None:
        _collect(known, every, data)
    found = {part.name: kept for part in every if (kept := part.kept(data)) is not None}
    for part in every:
        if part.name not in found:
            left = [other for other in every if other.name not in found]
            say(_left(left))
            found[part.name] = part.measured(data, program)
            _write(folder, about, every, found)
    _write(folder, about, every, found)
    return folder / "index.html"


def _collect(known: Path, every: Sequence[Measurement], data: Path) -> None:
    if not known.is_dir():
        raise BadInputError(f"--from {known} is no folder: name one with the JSON files of python -m benchmarks")
    for part in every:
        if part.kept(data) is None:
            part.collect(known, data)


def _left(left: Sequence[Measurement]) -> str:
    names = ", ".join(part.name for part in left)
    return f"left: {names}; about {max(1, round(sum(part.minutes for part in left)))} minutes on two cores"


def _check(file: Path, about: dict[str, Any]) -> None:
    if file.is_file():
        there = json.loads(file.read_text(encoding="utf-8"))
        other = [f"{name} {there.get(name)}" for name in about if there.get(name) != about[name]]
        if other:
            raise BadInputError(f"{file.parent.parent} holds a report with {', '.join(other)}: name another --out")
    write_json(about, file)


def _write(folder: Path, about: dict[str, Any], every: Sequence[Measurement], found: dict[str, Any]) -> None:
    charts = drawn(found)
    write_whole(page(about, every, found, charts).encode(), folder / "index.html")
    write_whole(markdown(about, every, found, charts).encode(), folder / "report.md")
