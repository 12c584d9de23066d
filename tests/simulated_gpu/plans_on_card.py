"""Full-size plans on a card that gives just what was planned: ``python tests/simulated_gpu/plans_on_card.py``.

Shapes only: all memory is taken by torch's own allocator and nothing is computed. Rows go to
``benchmarks/plans_on_card.md`` as they come, and what is there is not run again.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

MIB = 1 << 20
TABLE = Path(__file__).parents[2] / "benchmarks" / "plans_on_card.md"
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
(`tests/simulated_gpu/plans_on_card.py` wrote this). The card gives what the plan says it reserves, and the context
beside it; the plan's allowance for libraries is not there. Budgets from the least (0) to the plain model's (1); MiB.

| model | side | budget | peak planned | peak | reserved planned | reserved | ran |
|---|---|---|---|---|---|---|---|
"""


class Row(NamedTuple):
    """What was planned and what was, in bytes."""

    planned_peak: int
    peak: int
    planned_reserved: int
    reserved: int
    ran: bool


def on_card(simulated: Any, model: str, side: int, share: float, workspace_bytes: int = 0) -> Row:
    """Plan at ``share``, and run on a card that gives what is planned, and ``workspace_bytes``."""
    import torch

    simulated.kernels.computes = False
    try:
        return _on_card(simulated.card, model, side, share, workspace_bytes)
    finally:
        simulated.kernels.computes = True
        gc.collect()
        torch.cuda.empty_cache()


def _on_card(card: Any, model: str, side: int, share: float, workspace_bytes: int) -> Row:
    import torch

    from sd_lowvram import optimize, plan
    from sd_lowvram.bench.models import random_pipeline

    with card.of_size(_ENOUGH):
        pipe = random_pipeline(model, torch.device("cuda"))
    sizes: Any = {"width": side, "height": side, "device": "cuda", "ram": "64GB"}
    plain = plan(pipe, vram="64GB", **sizes)
    least, most = plain.minimum_vram_bytes, plain.predicted.reserved_bytes + plain.predicted.overhead_bytes
    torch.cuda.empty_cache()
    with card.of_size(_ENOUGH):
        chosen = optimize(pipe, vram=f"{least + int(share * (most - least))} b", **sizes).predicted
    torch.cuda.reset_peak_memory_stats()
    with card.of_size(chosen.reserved_bytes + workspace_bytes, context=0), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe("a red apple", width=side, height=side, num_inference_steps=2, output_type="pt")
    ran = not any("ran out of memory" in str(warning.message) for warning in told)  # and went on with a leaner plan
    held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Row(chosen.peak_bytes, held[0], chosen.reserved_bytes, held[1], ran)


def main() -> int:
    from simulated_card.card import card

    card()
    from on_card import Simulated

    simulated = Simulated()
    if not TABLE.exists():
        TABLE.write_text(_HEAD, encoding="utf-8")
    failed = 0
    for model, side, share in ROWS:
        start = f"| {model} | {side} | {share} |"
        if start in TABLE.read_text(encoding="utf-8"):
            continue
        row = on_card(simulated, model, side, share)
        cells = [f"{figure / MIB:.0f}" for figure in row[:4]] + ["yes" if row.ran else "**no**"]
        print(start, " | ".join(cells), flush=True)
        with TABLE.open("a", encoding="utf-8") as table:
            table.write(f"{start} {' | '.join(cells)} |\n")
        failed += not row.ran
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
