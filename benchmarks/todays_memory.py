"""What host memory and disk make of today's transformers: seconds a step on two cards, as plans foretell them."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.disk import DISKS
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.search import PlanSearch, best_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

from .tables import Columns, Row, filled, rows_table

MODELS = ("flux1-dev", "klein-4b", "klein-9b", "sd3.5-medium", "sd3.5-large", "z-image", "chroma1", "qwen-image")
SIDES = (1024,)
_CARDS = ("rtx3060", "rtx3050-laptop")
_VRAM, _RAM, _DISKS = (4, 6, 8), (16, 32, 64), ("nvme", "sata")
_SYSTEM = 4
"""GiB of host memory that the system and Python are left."""
_STEPS = 20
_SLOWER = 1.05
"""A step that takes so many times its compute is said to be limited by something else."""
_anatomy = functools.lru_cache(1)(lambda model: meta_anatomy(model, torch.bfloat16))


def run(models: Sequence[str] = MODELS, sides: Sequence[int] = SIDES, *, out: Path | None) -> dict[str, Any]:
    """Plan the models in bf16; writes ``out`` and JSON, model by model, and goes on with what lacks."""
    cases = [{"side": side, "model": model} for side in sides for model in models]
    return filled({"steps": _STEPS, "system_gib": _SYSTEM}, cases, _planned, lines, out, "models and sizes")


def _planned(side: int, model: str) -> dict[str, Any]:
    """Every budget, by "card vram ram disk" in GiB, with the processor's seconds."""
    cells: dict[str, Any] = {}
    taken, like = [], None
    for card, vram, ram, disk in itertools.product(_CARDS, _VRAM, _RAM, _DISKS):
        held = cells.get(f"{card} {vram} {ram} {_DISKS[0]}") or cells.get(f"{card} {vram} {ram // 2} {_DISKS[0]}")
        name = f"{card} {vram} {ram} {disk}"
        if held is not None and (held.get("limit") == "vram" or held.get("all_held") or held.get("disk_bytes") == 0):
            cells[name] = held  # as with less memory, or a faster disk
            continue
        start = time.process_time()
        cells[name], like = _cell(model, side, card, vram, ram - _SYSTEM, disk, like)
        taken.append(time.process_time() - start)
    return {"cells": cells, "first_seconds": taken[0], "plans": len(taken), "all_seconds": sum(taken)}


def _cell(
    model: str, side: int, card: str, vram: int, ram: int, disk: str, like: PlanSearch | None
) -> tuple[dict[str, Any], PlanSearch]:
    anatomy = _anatomy(model)
    asked: dict[str, Any] = {"vram": vram * GIB, "ram": ram * GIB, "width": side, "height": side, "disk": DISKS[disk]}
    search = PlanSearch(anatomy, request_by("ours", anatomy, gpu=card, steps=_STEPS, **asked), Settings(), False, like)
    try:
        return _told(best_plan(search, least=False)), search
    except BudgetError as error:
        return {"needed_bytes": error.needed_bytes, "limit": error.limit}, search


def _told(plan: Plan) -> dict[str, Any]:
    denoise = next(stage for stage in plan.stages if stage.name == "denoise")
    return {
        "seconds": denoise.seconds / _STEPS,
        "slowdown": denoise.slowdown,
        "disk_bytes": denoise.disk_bytes,
        "disk_wait": denoise.disk_wait,
        "card_bytes": plan.predicted.reserved_bytes + plan.predicted.overhead_bytes,
        "host_bytes": plan.predicted.host_bytes,
        "all_held": not denoise.unlocked_bytes,
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The tables as Markdown, one for each card and size."""
    yield "# Today's models by host memory and disk, foretold"
    yield ""
    yield (
        f"Seconds a step and, in brackets, over the compute with all weights on the card: in bf16, {report['steps']} "
        "steps, the first reading shared among them; nothing ran on a card. Of host memory, in GB, "
        f"{report['system_gib']} are left to the system. NVMe reads {DISKS['nvme'] / 1e9:g} GB/s, SATA "
        f"{DISKS['sata'] / 1e9:g}. What limits a step that takes more than {_SLOWER} of its compute follows: the disk, "
        "or the copies to the card."
    )
    for card, side in itertools.product(_CARDS, sorted({row["side"] for row in report["rows"]})):
        yield from ("", f"## {profile(card).title}, {side}x{side}", "")
        rows = [row for row in report["rows"] if row["side"] == side]
        yield from rows_table(_COLUMNS, ({**row, "card": card, "vram": vram} for row in rows for vram in _VRAM))
    yield ""
    took = [row["first_seconds"] for row in report["rows"]]
    count, whole = (sum(row[name] for row in report["rows"]) for name in ("plans", "all_seconds"))
    yield (
        f"A first plan of a model and size took {min(took):.0f} to {max(took):.0f} s of a processor, of {count} plans "
        f"one {whole / count:.1f} s on average; budgets of which a smaller one holds all are not planned again."
    )


def _shown(ram: int, disk: str, row: Row) -> str:
    cell = row["cells"][f"{row['card']} {row['vram']} {ram} {disk}"]
    if "needed_bytes" in cell:
        return f"needs {cell['needed_bytes'] / GIB:.2f} GiB" + (" of RAM" if cell["limit"] == "ram" else "")
    limit = ""
    if cell["slowdown"] > _SLOWER:
        waits = cell["disk_wait"] > (1 - 1 / cell["slowdown"]) * cell["seconds"] / 2
        limit = " disk" if waits else " copies"
    return f"{cell['seconds']:.1f} ({cell['slowdown']:.2f}){limit}"


_COLUMNS: Columns = (
    ("model", "`{model}`"),
    ("GB of the card", "{vram}"),
    *(
        (f"{ram} GB, {title}", functools.partial(_shown, ram, disk))
        for ram, (disk, title) in itertools.product(_RAM, zip(_DISKS, ("NVMe", "SATA"), strict=True))
    ),
)
