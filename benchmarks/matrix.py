"""Seconds of a picture by height and width: predicted for a GPU, or measured here; never both in one file.

The form is that of a published report on an RTX 2070 (sizes from 256 to 1024 in steps of 64, both orientations). Each
size is a record of its own, written as it comes; the same command goes on with those that lack.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sd_lowvram import progress
from sd_lowvram.devices.info import default_device
from sd_lowvram.devices.pairs import spread
from sd_lowvram.errors import BadInputError, BudgetError
from sd_lowvram.files.tables import table
from sd_lowvram.files.whole import write_whole
from sd_lowvram.plots.style import as_png
from sd_lowvram.policies.named import check_policy
from sd_lowvram.settings import Settings
from sd_lowvram.units import format_size, parse_size

from .pictures import name_of
from .plots.heat_map import heat_map
from .tables import BUSY, trusted, written

_RUNS = 3
_TITLES = {True: "foretold", False: "measured"}
Cell = dict[str, Any]
"""``height``, ``width``, and ``seconds`` and ``peak_bytes``, or ``needed_bytes`` where the size does not fit."""


def run(
    model: str | None,
    sides: Sequence[int],
    *,
    gpu: str | None = None,
    vram: str | None = None,
    steps: int = 20,
    policy: str = "ours",
    out: Path,
    again: bool = False,
) -> dict[str, Any]:
    """Fill the matrix in ``out/matrix-MODEL-CARD.json``, and write table and heat map beside it.

    Args:
        model: an architecture's name or a model on disk; None: the demo model.
        gpu: the GPU of the prediction. None: measure on this machine; the model needs weights.
        vram: budget; None: the card's, or what is free.
        policy: by which the pictures are made.
        again: forget what was measured before.

    Raises:
        BadInputError: a model without weights is to be measured, or a file that is of other steps or another budget.
    """
    out.mkdir(parents=True, exist_ok=True)
    if gpu is None:
        check_policy(policy, default_device().type)
    by = "" if policy == "ours" else f"-{policy}"
    file = out / f"matrix-{name_of(model)}-{gpu or 'here'}{by}.json"
    asked = {"model": name_of(model), "card": gpu, "vram": vram, "steps": steps, "how": _TITLES[gpu is not None]}
    asked["policy"] = policy
    report = _begun(file, asked, again)
    report["cells"] = [cell for cell in report["cells"] if _told(cell)]  # what a busy machine gave is measured anew
    known = {(cell["height"], cell["width"]) for cell in report["cells"]}
    missing = [size for size in itertools.product(sides, sides) if size not in known]
    timed = _foretelling(model, gpu, vram, steps, policy) if gpu else _measuring(model, vram, steps, policy)
    for height, width in progress.counted("sizes", missing):
        report["cells"].append({"height": height, "width": width, **timed(height, width)})
        write_whole(json.dumps(report, indent=1).encode() + b"\n", file)
    report["cells"].sort(key=lambda cell: (cell["height"], cell["width"]))
    report = written(report, lines, file.with_suffix(".md"))
    write_whole(as_png(heat_map(title(report), seconds_by_size(report))), file.with_suffix(".png"))
    return report


def _begun(file: Path, asked: dict[str, Any], again: bool) -> dict[str, Any]:
    if again or not file.is_file():
        return {**asked, "cells": []}
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    other = [name for name in asked if report.get(name) != asked[name]]
    if other:
        told = ", ".join(f"{name} {report.get(name)}" for name in other)
        raise BadInputError(f"{file} was made with {told}: begin anew with --again, or name another --out")
    return report


def _foretelling(model: str | None, gpu: str, vram: str | None, steps: int, policy: str) -> Callable[[int, int], Cell]:
    import torch

    from sd_lowvram.checkpoints.meta_model import meta_anatomy
    from sd_lowvram.planning.as_others import request_by
    from sd_lowvram.planning.search import make_plan

    anatomy = meta_anatomy(model, torch.float16)
    budget = None if vram is None else parse_size(vram)

    def timed(height: int, width: int) -> Cell:
        request = request_by(policy, anatomy, gpu=gpu, vram=budget, width=width, height=height, steps=steps)
        try:
            plan = make_plan(anatomy, request, Settings.policy(policy))
        except BudgetError as error:
            return {"needed_bytes": error.needed_bytes}
        return {"seconds": plan.predicted.seconds, "peak_bytes": plan.predicted.peak_bytes}

    return timed


def _measuring(model: str | None, vram: str | None, steps: int, policy: str) -> Callable[[int, int], Cell]:
    from sd_lowvram.api import plan
    from sd_lowvram.devices.info import default_device
    from sd_lowvram.planning.as_others import way_of

    from .pictures import loaded, timed_pictures

    device, pipe = default_device(), loaded(model)

    def timed(height: int, width: int) -> Cell:
        size: dict[str, Any] = {"width": width, "height": height, "steps": steps, "device": device}
        planned = functools.partial(plan, pipe, vram=vram, settings=Settings.policy(policy), **size)
        try:
            peak = planned().predicted.peak_bytes
        except BudgetError as error:
            return {"needed_bytes": error.needed_bytes}
        with way_of(policy, pipe, device, planned, lambda: loaded(model))() as running:
            (seconds,), own = timed_pictures(running, width, height, steps, _RUNS)
        return {"seconds": median(seconds), "spread": spread(seconds), "own": own, "peak_bytes": peak}

    return timed


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The matrix as a Markdown table."""
    heights, widths = _sides(report)
    cells = {(cell["height"], cell["width"]): cell for cell in report["cells"]}
    yield f"# {title(report)}"
    yield ""
    medians = f", medians of {_RUNS} pictures" if report["card"] is None else ""
    yield f"Seconds by height and width{medians}."
    yield ""
    rows = ([str(height), *(_cell(cells.get((height, width))) for width in widths)] for height in heights)
    yield from table(("", *map(str, widths)), rows)


def title(report: dict[str, Any]) -> str:
    """Model, steps and place of a matrix, and whether it was measured."""
    place = report["card"] or "this machine"
    budget = f" in {report['vram']}" if report["vram"] else ""
    return f"{report['model']}, {report['policy']}, {report['steps']} steps, {report['how']} for {place}{budget}"


def seconds_by_size(report: dict[str, Any]) -> dict[tuple[int, int], float | None]:
    """Seconds by height and width; None if the size does not fit, or the machine was busy."""
    return {(cell["height"], cell["width"]): cell.get("seconds") if _told(cell) else None for cell in report["cells"]}


def _told(cell: Cell) -> bool:
    return trusted(cell, "spread")


def _sides(report: dict[str, Any]) -> tuple[list[int], list[int]]:
    return tuple(sorted({cell[side] for cell in report["cells"]}) for side in ("height", "width"))  # type: ignore[return-value]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if not _told(cell):
        return BUSY
    return f"{cell['seconds']:.1f}" if "seconds" in cell else f"needs {format_size(cell['needed_bytes'])}"
