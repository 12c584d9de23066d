"""The least memory that lossless settings need, size by size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.files.tables import table
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import PlanSearch
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB, format_size, format_time

from .tables import written

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
"""What the allocator may take for the least peak at most: fp16, batch 1, with guidance. None: nothing was promised."""

_NOTE = """# The least memory that lossless settings need

Nothing ran on a GPU: peaks are traced, times those of the {card} profile for
30 steps with these smallest settings, which nobody would choose with more memory. fp16, batch 1, with guidance. *In
segments* is what the allocator takes for the peak and the libraries' workspaces, of a stated size, which the bound is
for; *least budget* counts the driver's share too, another stated default. *In host memory* with weights in ordinary
memory, and with weights left in a mapped file. *Searching* is processor time.
"""


def run(out: Path | None = None, card: str = "rtx2070", only: tuple[str, ...] = ()) -> dict[str, Any]:
    """The smallest candidate of every size of ``BOUNDS``; also into ``out`` as Markdown, and JSON beside it.

    Args:
        only: models; empty: all.
    """
    chosen = [(model, size) for model, size in BOUNDS if model in only or not only]
    rows = [_row(model, size, card) for model, size in progress.counted("plans", chosen)]
    return written({"card": profile(card).title, "rows": rows}, lines, out)


def _row(model: str, size: int, card: str) -> dict[str, Any]:
    start = time.process_time()
    anatomy = meta_anatomy(model, torch.float16)
    request = request_for(
        anatomy, vram=4 * GIB, ram=64 * GIB, width=size, height=size, device="cuda", rates=profile(card)
    )
    smallest = PlanSearch(anatomy, request, Settings(precision="fp16"), approximate=False).smallest()
    assert smallest is not None  # no bound on allocations was given
    return {
        "model": model,
        "size": size,
        "bound_bytes": BOUNDS[model, size],
        "minimum_peak_bytes": smallest.peak_bytes,
        "minimum_reserved_bytes": smallest.predicted.reserved_bytes,
        "minimum_vram_bytes": smallest.needed_bytes,
        "host_bytes": smallest.host_bytes,
        "minimum_ram_bytes": smallest.least_host_bytes,
        "seconds": smallest.seconds,
        "searching_seconds": time.process_time() - start,
    }


_HEADS = (
    *("model", "size", "least peak", "in segments", "bound", "least budget", "in host memory", "weights mapped"),
    *("time", "searching"),
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    yield _NOTE.format(card=report["card"])
    yield from table(_HEADS, map(_cells, report["rows"]))


def _cells(row: dict[str, Any]) -> list[str]:
    least, bound = row["minimum_reserved_bytes"], row["bound_bytes"]
    promise = "" if bound is None else format_size(bound) + ("" if least <= bound else " (missed)")
    sizes = [format_size(row[name]) for name in ("minimum_vram_bytes", "host_bytes", "minimum_ram_bytes")]
    times = [format_time(row["seconds"]), f"{row['searching_seconds']:.1f} s"]
    return [
        row["model"],
        f"{row['size']}x{row['size']}",
        format_size(row["minimum_peak_bytes"]),
        format_size(least),
        promise,
        *sizes,
        *times,
    ]
