"""Predicted VRAM, RAM and seconds a step of today's transformers on a GPU, by name and size."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.api import anatomy_for_call
from sd_lowvram.checkpoints.architectures import PIPELINES, TRANSFORMERS, architecture
from sd_lowvram.checkpoints.meta_model import meta_anatomy, named_pipeline
from sd_lowvram.compat.private import tree_flatten
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.models.recorded import Given, Rehearsal
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.request import RunOptions
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

from .tables import Columns, Row, empty_cache, filled, rows_table

SIDES = (512, 1024, 2048)
_STEPS = 20
_FILMS = ("wan2.2-5b", "ltx-video")
"""Models that are planned with the frames of their pipeline, at the least size."""
_BINNED = ("sana-1.6b", "pixart-sigma")
"""Models whose pipelines draw at the side that they were trained at."""

_anatomy = functools.lru_cache(1)(lambda model: meta_anatomy(model, torch.bfloat16))
_pipeline = functools.lru_cache(1)(lambda model: named_pipeline(model, torch.bfloat16))


def run(
    card: str = "rtx3060",
    vram: int = 4 * GIB,
    ram: int = 64 * GIB,
    models: Sequence[str] = (*TRANSFORMERS, *PIPELINES),
    *,
    out: Path | None,
) -> dict[str, Any]:
    """Plan the models in bf16; writes ``out`` and JSON, model by model, and goes on with what lacks."""
    told = {"card": card, "title": profile(card).title, "vram_bytes": vram, "ram_bytes": ram, "steps": _STEPS}
    cases = [{"model": model, "side": side} for model in models for side in SIDES[: 1 if model in _FILMS else None]]
    return filled(told, cases, functools.partial(_planned, card, vram, ram), lines, out, "models and sizes")


def _planned(card: str, vram: int, ram: int, model: str, side: int) -> dict[str, Any]:
    (_pipeline if model in PIPELINES else _anatomy)(model)
    with empty_cache():
        return _first_plan(card, vram, ram, model, side)


def _first_plan(card: str, vram: int, ram: int, model: str, side: int) -> dict[str, Any]:
    """Figures of a plan, and the processor's seconds until it is made."""
    began = time.process_time()
    anatomy = _rehearsed(model, side) if model in PIPELINES else _anatomy(model)
    request = request_by("ours", anatomy, gpu=card, vram=vram, ram=ram, width=side, height=side, steps=_STEPS)
    try:
        plan = make_plan(anatomy, request, Settings())
    except BudgetError as error:
        needed = {"needed_bytes": error.needed_bytes, "limit": error.limit}
        return needed | {"plan_seconds": time.process_time() - began}
    denoise = [stage for stage in plan.stages if stage.name == "denoise"]
    seconds = sum(stage.seconds for stage in denoise)
    record = anatomy.rehearsal
    calls = sum(record.counts[stage.component] for stage in denoise) // _STEPS if record else request.calls
    return {
        "card_bytes": plan.predicted.reserved_bytes + plan.predicted.overhead_bytes,
        "least_bytes": plan.minimum_vram_bytes,
        "host_bytes": plan.predicted.host_bytes,
        "seconds": seconds / _STEPS,
        "slowdown": seconds / sum(stage.seconds / stage.slowdown for stage in denoise),
        "calls": calls,
        "passes": _rows_in_call(record) if record else request.passes,
        "plan_seconds": time.process_time() - began,
    }


def _rehearsed(model: str, side: int) -> Anatomy:
    run: RunOptions = {"width": side, "height": side, "steps": _STEPS}
    return anatomy_for_call(_pipeline(model), None, run, True, architecture(model).get("call"))


def _rows_in_call(record: Rehearsal) -> int:
    """Rows of the largest batch that the denoiser is called with."""
    row = next(row for row in record.rows if row.component == record.denoiser)
    given = (leaf for leaf in tree_flatten((row.args, row.kwargs))[0] if isinstance(leaf, Given))
    return max((tensor.shape[0] for tensor in given if len(tensor.shape) > 2), default=1)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The tables as Markdown, one for each size."""
    timed = all("plan_seconds" in row for row in report["rows"])
    yield f"# Today's models in {report['vram_bytes'] / GIB:g} GiB of an {report['title']}, predicted"
    yield ""
    yield (
        f"In bf16 with {report['ram_bytes'] / GIB:g} GiB of host memory, {report['steps']} steps, as plans predict "
        "them; nothing ran on a card. *GiB of the card*: what torch reserves and the driver holds. *Over compute*: a "
        "step's time over that with all weights on the card."
        + " *To plan*: seconds of a processor for a first plan."
        * timed
    )
    if any(row["model"] in _BINNED for row in report["rows"]):
        yield ""
        yield (
            "The pipelines of `sana-1.6b` and `pixart-sigma` draw at the side that they were trained at, 1024, and "
            "scale the picture to the requested size: a step takes as long at each."
        )
    for side in SIDES:
        yield from ("", f"## {side}x{side}", "")
        columns = (*_COLUMNS, *_PLANNING) if timed else _COLUMNS
        yield from rows_table(columns, (row for row in report["rows"] if row["side"] == side))


def _gib(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name] / GIB:.2f}" if name in row else ""


def _needed(row: Row) -> str:
    return f"needs {row['needed_bytes'] / GIB:.2f}" + (" of RAM" if row.get("limit") == "ram" else "")


def _calls(row: Row) -> str:
    return f"{row['calls']}" + (f", of {row['passes']} rows" if row["passes"] > 1 else "")


_COLUMNS: Columns = (
    ("model", "`{model}`"),
    ("GiB of the card", lambda row: _gib("card_bytes")(row) or _needed(row)),
    ("least", _gib("least_bytes")),
    ("GiB of host memory", _gib("host_bytes")),
    ("seconds a step", lambda row: f"{row['seconds']:.1f}" if "seconds" in row else ""),
    ("over compute", lambda row: f"{row['slowdown']:.2f}" if "seconds" in row else ""),
    ("calls a step", lambda row: _calls(row) if "seconds" in row else ""),
)
_PLANNING: Columns = (("to plan", lambda row: f"{row['plan_seconds']:.0f} s"),)
