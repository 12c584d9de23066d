"""Predicted seconds a step of today's transformers on two GPUs, by RAM and disk."""

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

from .ladder import new_machine
from .tables import Columns, Row, filled, rows_table

MODELS = ("flux1-dev", "klein-4b", "klein-9b", "sd3.5-medium", "sd3.5-large", "z-image", "chroma1", "qwen-image")
SIDES = (512, 1024, 2048)
_LARGE = 2048
"""Side of pictures for which only the smallest budget is planned."""
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
    _anatomy(model)
    cells: dict[str, Any] = {}
    taken, like = [], None
    with new_machine():
        for card, vram, ram, disk in itertools.product(_CARDS, _parts(side), _RAM, _DISKS):
            held = cells.get(f"{card} {vram} {ram} {_DISKS[0]}") or cells.get(f"{card} {vram} {ram // 2} {_DISKS[0]}")
            name = f"{card} {vram} {ram} {disk}"
            if held is not None and (
                held.get("limit") == "vram" or held.get("all_held") or held.get("disk_bytes") == 0
            ):
                cells[name] = held  # as with less memory, or a faster disk
                continue
            start = time.process_time()
            cells[name], like = _cell(model, side, card, vram, ram - _SYSTEM, disk, like)
            taken.append(time.process_time() - start)
        _anatomy.cache_clear()
        start = time.process_time()
        _anatomy(model)
        made = time.process_time()
        _cell(model, side, _CARDS[0], _VRAM[0], _RAM[0] - _SYSTEM, _DISKS[0], None)
        again = time.process_time() - made
    return {
        "cells": cells,
        "first_seconds": taken[0],
        "again_seconds": again,
        "built_seconds": made - start,
        "plans": len(taken),
        "all_seconds": sum(taken),
    }


def _parts(side: int) -> tuple[int, ...]:
    """GB of the card."""
    return _VRAM if side < _LARGE else _VRAM[:1]


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
    yield "# Today's models by host memory and disk, predicted"
    yield ""
    yield (
        f"Seconds a step and, in brackets, over the compute with all weights on the card: in bf16, {report['steps']} "
        "steps, the first reading shared among them; nothing ran on a card. Of host memory, in GB, "
        f"{report['system_gib']} are left to the system. NVMe reads {DISKS['nvme'] / 1e9:g} GB/s, SATA "
        f"{DISKS['sata'] / 1e9:g}. What limits a step that takes more than {_SLOWER} of its compute follows: the disk, "
        f"or the copies to the card. Of {_LARGE}x{_LARGE}, {_VRAM[0]} GB of the card were planned alone."
    )
    for side, card in itertools.product(sorted({row["side"] for row in report["rows"]}), _CARDS):
        yield from ("", f"## {side}x{side}, {profile(card).title}", "")
        rows = [{**row, "card": card} for row in report["rows"] if row["side"] == side]
        yield from rows_table(_COLUMNS, (shown for row in rows for shown in _alike(row)))
    yield ""
    first, again, built = (_from_to(report, name) for name in ("first_seconds", "again_seconds", "built_seconds"))
    count, whole = (sum(row[name] for row in report["rows"]) for name in ("plans", "all_seconds"))
    yield (
        f"Seconds of a processor for a plan, besides {built} in which the model's modules are made without weights: "
        f"{first} for the first of a model and size, {again} once more, its traces in the cache, and "
        f"{whole / count:.1f} on average of {count}, those with other budgets too. Budgets of which a smaller one "
        "holds all are not planned again."
    )


def _from_to(report: dict[str, Any], name: str) -> str:
    taken = [row[name] for row in report["rows"]]
    return f"{min(taken):.1f} to {max(taken):.1f}"


def _alike(row: Row) -> Iterator[Row]:
    """A row for each part of the card from which on the cells differ."""
    for _, group in itertools.groupby(_parts(row["side"]), lambda vram: _cells({**row, "vram": vram})):
        sizes = list(group)
        yield {**row, "vram": sizes[0], "sizes": ", ".join(map(str, sizes))}


def _cells(row: Row) -> list[str]:
    return [_shown(ram, disk, row) for ram in _RAM for disk in _DISKS]


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
    ("GB of the card", "{sizes}"),
    *(
        (f"{ram} GB, {title}", functools.partial(_shown, ram, disk))
        for ram, (disk, title) in itertools.product(_RAM, zip(_DISKS, ("NVMe", "SATA"), strict=True))
    ),
)
