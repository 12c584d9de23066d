"""Plans of full-size models on named cards: ``make plans`` compares all with ``tests/planning/baseline.json``.

Each row holds a request with its plan, or with its refusal and the budget that would be enough. ``make plans
PLANS=write`` stores the plans of now (some minutes on one core) and prints what moved; the commit gives the reason.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.disk import DISKS
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import PlanSearch, make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB

FILE = Path(__file__).parents[1] / "planning" / "baseline.json"
ROWS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))

anatomy = functools.cache(functools.partial(meta_anatomy, dtype=torch.float16))


def plan_of(asked: dict[str, Any]) -> dict[str, Any]:
    """The plan or the refusal of a row's request."""
    model = anatomy(asked["model"])
    settings = Settings(precision="fp16", **asked.get("knobs", {}))
    request = request_for(
        model,
        vram=asked.get("vram_mib", 4096) * MIB,
        ram=int(asked.get("ram_gib", 64) * GIB),
        width=asked["size"],
        height=asked["size"],
        batch=asked.get("batch", 1),
        device="cuda",
        rates=profile(asked.get("card", "rtx2070")),
        disk=DISKS["nvme"],
    )
    if asked.get("smallest"):
        run = PlanSearch(model, request, settings, approximate=False).smallest()
        assert run is not None
        least = {"least_peak": run.peak_bytes, "least_host": run.least_host_bytes}
        return least | {"host": run.host_bytes, "seconds": run.seconds, "settings": _knobs(run.settings)}
    try:
        plan = make_plan(model, request, settings, asked.get("approximate", False))
    except BudgetError as error:
        return {"needed": error.needed_bytes, "stage": error.stage, "limit": error.limit}
    found = {"peak": plan.predicted.peak_bytes, "seconds": plan.predicted.seconds, "host": plan.predicted.host_bytes}
    least = {"least_peak": plan.minimum_peak_bytes, "least_host": plan.minimum_ram_bytes}
    return found | least | {"settings": _knobs(plan.settings)}


def with_remedy(asked: dict[str, Any], refusal: dict[str, Any]) -> dict[str, Any]:
    """The request with as much of what was short as the refusal says."""
    mib = -(-refusal["needed"] // MIB)
    if refusal["limit"] == "largest_mib":
        return asked | {"knobs": asked["knobs"] | {"largest_mib": mib}}
    return asked | ({"vram_mib": mib} if refusal["limit"] == "vram" else {"ram_gib": mib * MIB / GIB})


def _knobs(settings: Settings) -> dict[str, Any]:
    return {name: value for name, _, value in settings.decided()}


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Figures and settings that differ, before and now: seconds by more than a millionth, all other values at all."""
    before, now = (one | {"settings": None} | one.get("settings", {}) for one in (before, now))
    if math.isclose(before.get("seconds", 0), now.get("seconds", -1), rel_tol=1e-6):
        now = now | {"seconds": before["seconds"]}
    names = [*before, *(name for name in now if name not in before)]
    return {name: (before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)}


def main(write: bool) -> int:
    changed = 0
    for row in ROWS:
        now = plan_of(row["asked"])
        found = differences(row["planned"], now)
        if "needed" in now and "needed" in plan_of(with_remedy(row["asked"], now)):
            found["remedy"] = ("fits", "is refused")
        changed += bool(found)
        print(row["asked"], *(f"\n    {name}: {was} -> {new}" for name, (was, new) in found.items()), flush=True)
        row["planned"] = now
    print(f"{changed} of {len(ROWS)} plans moved")
    if write:
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n", encoding="utf-8")
        print(f"{FILE.name} is written: give the reason for what moved in the body of the commit")
    return 1 if changed and not write else 0


if __name__ == "__main__":
    sys.exit(main("write" in sys.argv[1:]))
