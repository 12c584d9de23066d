"""Plans as they once were, and whether they are still as good: ``python tests/support/plan_baseline.py`` compares all.

``tests/planning/baseline.json`` holds, for full-size models on named cards, what was asked and what was planned or
refused. A plan may get better; one that is worse by more than 1 % takes a reason beside its figures.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import PlanSearch, make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB

ROWS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "planning" / "baseline.json").read_text(encoding="utf-8")
)

anatomy = functools.cache(functools.partial(meta_anatomy, dtype=torch.float16))


def planned(asked: dict[str, Any]) -> dict[str, Any]:
    """What is planned for a row's request now, or how it is refused."""
    model = anatomy(asked["model"])
    settings = Settings(precision="fp16", **asked.get("knobs", {}))
    request = request_for(
        model,
        vram=asked.get("vram_mib", 4096) * MIB,
        ram=asked.get("ram_gib", 64) * GIB,
        width=asked["size"],
        height=asked["size"],
        batch=asked.get("batch", 1),
        device="cuda",
        rates=profile(asked.get("card", "rtx2070")),
    )
    if asked.get("smallest"):
        run = PlanSearch(model, request, settings, approximate=False).smallest()
        assert run is not None
        least = {"least_peak": run.peak_bytes, "least_host": run.least_host_bytes}
        return least | {"host": run.host_bytes, "seconds": run.seconds}
    try:
        plan = make_plan(model, request, settings, asked.get("approximate", False))
    except BudgetError as error:
        return {"needed": error.needed_bytes, "stage": error.stage}
    found = {"peak": plan.predicted.peak_bytes, "seconds": plan.predicted.seconds, "host": plan.predicted.host_bytes}
    return found | {"least_peak": plan.minimum_peak_bytes, "least_host": plan.minimum_ram_bytes}


def worse(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The figures that are more than 1 % above what they were, and what is refused that was not."""
    if "needed" in now and "needed" not in before:
        return {"refused": (None, now["needed"])}
    figures = {name: value for name, value in before.items() if name in now and not isinstance(value, str)}
    return {name: (value, now[name]) for name, value in figures.items() if now[name] > 1.01 * value}


def main() -> int:
    bad = 0
    for row in ROWS:
        found = worse(row["planned"], planned(row["asked"]))
        bad += bool(found)
        print(row["asked"], found or "as good", flush=True)
    print(f"{bad} of {len(ROWS)} are worse")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
