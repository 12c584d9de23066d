"""No lossless knob that is fixed by hand beats the plan of a full-size model, in time or in the least memory."""

from __future__ import annotations

import plan_baseline
import pytest

from sd_lowvram.devices.performance import profile
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB


def planned(model: str, side: int, budget_mib: int, card: str, **knobs: object) -> Plan:
    anatomy = plan_baseline.anatomy(model)
    asked = request_for(
        anatomy,
        vram=budget_mib * MIB,
        ram=64 * GIB,
        width=side,
        height=side,
        device="cuda",
        rates=profile(card),
    )
    return make_plan(anatomy, asked, Settings(precision="fp16", **knobs))  # type: ignore[arg-type]


@pytest.mark.slow(30)
@pytest.mark.parametrize(("model", "side", "budget_mib"), [("sd15", 512, 656), ("sdxl", 1024, 710)])
def test_layers_are_split_where_that_is_faster(model: str, side: int, budget_mib: int) -> None:
    plan = planned(model, side, budget_mib, "rtx2070")
    split = planned(model, side, budget_mib, "rtx2070", offload="layer", split_layers=True)
    assert plan.predicted.seconds <= 1.001 * split.predicted.seconds
    assert plan.minimum_vram_bytes <= split.minimum_vram_bytes
