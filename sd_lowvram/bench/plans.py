"""The least memory that lossless settings need, size by size, and what making each plan takes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from .. import progress
from ..blueprint import blueprint
from ..durations import format_time
from ..planner import make_plan
from ..plans import Request
from ..rates import profile
from ..settings import Settings
from ..sizes import GIB, MIB, format_size

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
"""What the least peak may be at most, in fp16, batch 1, with guidance. None: nothing was promised."""

_HEAD = """# Plans: the least memory, and what planning takes

Written by `sd-lowvram bench plans`; nothing ran on a GPU: peaks are traced, times are those of the named profile. fp16,
batch 1, with guidance, 30 steps, lossless otherwise. *Least peak* is without the driver's share, *least budget* with it
(a stated default). *Planning* is processor time of this process, one thread, models' libraries imported before.

| model | size | least peak | bound | least budget | in host memory | 4 GB on an {card} | planning | from the cache |
|---|---|---|---|---|---|---|---|---|
"""


def run(out: Path | None = None, card: str = "rtx2070", only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Plan every size of ``BOUNDS`` for 4 GB on ``card``; writes ``out`` (Markdown) where it is given.

    Args:
        only: models; empty: all.
    """
    chosen = [(model, size) for model, size in BOUNDS if model in only or not only]
    rows = []
    for number, (model, size) in enumerate(chosen):
        progress.report("plans", number, len(chosen))
        rows.append(_row(model, size, card))
    progress.report("plans", len(chosen), len(chosen))
    if out is not None:
        text = _HEAD.format(card=profile(card).title) + "".join(map(_line, rows))
        out.write_text(text, encoding="utf-8")
    return rows


def _row(model: str, size: int, card: str) -> dict[str, Any]:
    anatomy = blueprint(model, torch.float16)
    request = Request(size, size, 1, 4 * GIB, 64 * GIB, torch.device("cuda"), profile(card))
    times = []
    for _ in range(2):
        start = time.process_time()
        plan = make_plan(anatomy, request, Settings(precision="fp16"))
        times.append(time.process_time() - start)
    return {
        "model": model,
        "size": size,
        "bound_bytes": BOUNDS[model, size],
        "minimum_peak_bytes": plan.minimum_peak_bytes,
        "minimum_vram_bytes": plan.minimum_vram_bytes,
        "minimum_ram_bytes": plan.minimum_ram_bytes,
        "peak_bytes": plan.predicted.peak_bytes,
        "overhead_bytes": plan.predicted.overhead_bytes,
        "seconds": plan.predicted.seconds,
        "planning_seconds": times[0],
        "cached_seconds": times[1],
    }


def _line(row: dict[str, Any]) -> str:
    least, bound = row["minimum_peak_bytes"], row["bound_bytes"]
    promise = "" if bound is None else format_size(bound) + ("" if least <= bound else " (missed)")
    cells = (
        row["model"],
        f"{row['size']}x{row['size']}",
        format_size(least),
        promise,
        format_size(row["minimum_vram_bytes"]),
        format_size(row["minimum_ram_bytes"]),
        f"{format_size(row['peak_bytes'] + row['overhead_bytes'])}, {format_time(row['seconds'])}",
        f"{row['planning_seconds']:.1f} s",
        f"{row['cached_seconds']:.2f} s",
    )
    return f"| {' | '.join(cells)} |\n"


def printed(rows: list[dict[str, Any]], as_json: bool) -> str:
    """``rows`` for machines or for people."""
    return json.dumps(rows, indent=2) if as_json else "".join(map(_line, rows)).rstrip()
