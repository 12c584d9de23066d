"""Full-size plans on a card that gives just what was planned: ``python tests/simulated_gpu/plans_on_card.py``.

Shapes only: all memory is taken by torch's own allocator and nothing is computed. Rows go to
``benchmarks/plans_on_card.json``, and the table beside it, as they come; what is there is not run again.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
FILE = Path(__file__).parents[2] / "benchmarks" / "plans_on_card.json"
_ENOUGH = 16 << 30
SHARES = (0.0, 0.1, 0.5, 1.0)
"""Of the way from the least budget to that of the plain model."""
ROWS = [
    *(("sd15", side, share) for side in (512, 1024, 2048) for share in SHARES),
    *(("sdxl", 1024, tenth / 10) for tenth in range(11)),
    ("sd15", 4096, 0.0),
    ("sdxl", 2048, 0.0),
    ("sd21", 768, 0.0),
    ("sd21", 768, 0.5),
]
_HEAD = """# Plans on a simulated card of just their size

Full-size models, shapes only, two steps and a decode on torch's own CUDA allocator over a simulated card
(`tests/simulated_gpu/plans_on_card.py` wrote this). The card has just the bytes that the plan needs, the context's
among them; its libraries take no workspace, as calibration sees. Budgets from the least (0) to the plain model's (1);
MiB.
"""
_HEADS = "model", "side", "budget", "peak planned", "peak", "reserved planned", "reserved", "ran"


class Row(NamedTuple):
    """What was planned and what was, in bytes.

    Attributes:
        locked: most bytes of host memory that were page-locked, from the plan's attaching on.
    """

    planned_peak: int
    peak: int
    planned_reserved: int
    reserved: int
    ran: bool
    planned_host: int
    locked: int


def on_card(simulated: Any, model: str, side: int, share: float, **fixed: Any) -> Row:
    """Calibrate, plan at ``share`` with knobs that are ``fixed``, and run as a new process would on a card that gives
    what is planned."""
    import torch

    simulated.kernels.computes = False
    try:
        return _on_card(simulated, model, side, share, fixed)
    finally:
        simulated.kernels.computes = True
        gc.collect()
        torch.cuda.empty_cache()


def _on_card(simulated: Any, model: str, side: int, share: float, fixed: dict[str, Any]) -> Row:
    import full_size
    import torch

    from sd_lowvram import Settings, optimize, plan
    from sd_lowvram.devices.this_machine import overhead_of

    card = simulated.card
    with card.of_size(_ENOUGH):
        overhead_of(torch.device("cuda", 0), recalibrate=True)
        pipe = full_size.pipeline(model, torch.device("cuda"))
    sizes: Any = {"width": side, "height": side, "device": "cuda", "ram": "64GB", "settings": Settings(**fixed)}
    plain = plan(pipe, vram="64GB", **sizes)
    least, most = plain.minimum_vram_bytes, plain.predicted.reserved_bytes + plain.predicted.overhead_bytes
    torch.cuda.empty_cache()
    before = card.pinned
    card.reset_peaks()
    with card.of_size(_ENOUGH):
        chosen = optimize(pipe, vram=f"{least + int(share * (most - least))} b", **sizes).predicted
    simulated.kernels.forget()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    size = chosen.reserved_bytes + chosen.overhead_bytes
    with card.of_size(size), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe("a red apple", width=side, height=side, num_inference_steps=2, output_type="pt")
    ran = not any("ran out of memory" in str(warning.message) for warning in told)  # and went on with a leaner plan
    held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    locked = card.pinned_peak - before
    return Row(chosen.peak_bytes, held[0], chosen.reserved_bytes, held[1], ran, chosen.host_bytes, locked)


def main() -> int:
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests / "support")]
    from simulated_card.card import card

    card()
    from on_card import Simulated

    from benchmarks.tables import told_as, written

    simulated = Simulated()
    rows: list[list[Any]] = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else []
    for model, side, share in ROWS:
        if [model, side, share] in [row[:3] for row in rows]:
            continue
        row = on_card(simulated, model, side, share)
        rows.append([model, side, share, *(round(figure / MIB) for figure in row[:4]), row.ran])
        print(*rows[-1], flush=True)
        with told_as("python tests/simulated_gpu/plans_on_card.py"):
            written({"rows": rows}, lines, FILE.with_suffix(".md"))
    return 0 if all(row[-1] for row in rows) else 1


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    from sd_lowvram.files.tables import table

    yield _HEAD
    yield from table(_HEADS, ([*map(str, row[:-1]), "yes" if row[-1] else "**no**"] for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
