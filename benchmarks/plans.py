"""The least memory that lossless settings need, size by size."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import PlanSearch
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB, format_size, format_time

from .tables import Row, Sheet, empty_cache, filled

BOUNDS = {
    ("sd15", 512): 320 * MIB,
    ("sd15", 1024): 384 * MIB,
    ("sd15", 2048): 512 * MIB,
    ("sd15", 4096): 1536 * MIB,
    ("sd21", 768): None,
    ("sdxl", 1024): 640 * MIB,
    ("sdxl", 2048): GIB,
    ("sdxl", 4096): 2 * GIB,
}
"""Upper bounds for the allocator at the least peak: fp16, batch 1, with guidance. None: no bound was promised."""


def run(out: Path | None = None, card: str = "rtx2070", only: tuple[str, ...] = ()) -> dict[str, Any]:
    """The smallest candidate of every size of ``BOUNDS``; writes ``out`` and JSON, row by row.

    Args:
        only: models; empty: all.
    """
    cases = [{"model": model, "size": size} for model, size in BOUNDS if model in only or not only]
    return filled({"card": profile(card).title}, cases, functools.partial(_row, card), lines, out, "plans")


def _row(card: str, model: str, size: int) -> dict[str, Any]:
    with empty_cache():
        return _smallest(card, model, size)


def _smallest(card: str, model: str, size: int) -> dict[str, Any]:
    start = time.process_time()
    anatomy = meta_anatomy(model, torch.float16)
    request = request_for(
        anatomy, vram=4 * GIB, ram=64 * GIB, width=size, height=size, device="cuda", rates=profile(card)
    )
    smallest = PlanSearch(anatomy, request, Settings(precision="fp16"), approximate=False).smallest()
    assert smallest is not None  # no bound on allocations was given
    return {
        "bound_bytes": BOUNDS[model, size],
        "minimum_peak_bytes": smallest.peak_bytes,
        "minimum_reserved_bytes": smallest.predicted.reserved_bytes,
        "minimum_vram_bytes": smallest.needed_bytes,
        "host_bytes": smallest.host_bytes,
        "minimum_ram_bytes": smallest.least_host_bytes,
        "seconds": smallest.seconds,
        "searching_seconds": time.process_time() - start,
    }


def _size(name: str) -> Callable[[Row], str]:
    return lambda row: format_size(row[name])


def _bound(row: Row) -> str:
    bound = row["bound_bytes"]
    missed = bound is not None and row["minimum_reserved_bytes"] > bound
    return "" if bound is None else format_size(bound) + (" (missed)" if missed else "")


lines = Sheet(
    "The least memory that lossless settings need",
    """Nothing ran on a GPU: allocated bytes are traced, times those of the {card} profile for
30 steps with these smallest settings, which nobody would choose with more memory. fp16, batch 1, with guidance. *In
segments* is what the allocator takes for these and the libraries' workspaces, of a stated size, which the bound is
for; *least budget* counts the driver's share too, another stated default. *In host memory* with weights in ordinary
memory, and with weights left in a mapped file. *Searching* is processor time.""",
    (
        ("model", "{model}"),
        ("size", "{size}x{size}"),
        ("least allocated", _size("minimum_peak_bytes")),
        ("in segments", _size("minimum_reserved_bytes")),
        ("bound", _bound),
        ("least budget", _size("minimum_vram_bytes")),
        ("in host memory", _size("host_bytes")),
        ("weights mapped", _size("minimum_ram_bytes")),
        ("time", lambda row: format_time(row["seconds"])),
        ("searching", "{searching_seconds:.1f} s"),
    ),
).lines
