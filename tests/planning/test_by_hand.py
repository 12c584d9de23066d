"""No lossless knob that is fixed by hand beats the plan of a full-size model, in time or in the least memory.

Most tests here are ``rare``. ``SD_LOWVRAM_BY_HAND=1`` requests all models, budgets and cards (some 20 minutes on one
core), and prints each find.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import plan_baseline
import pytest

from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import PlanSearch
from sd_lowvram.planning.search import best_plan as plan_of
from sd_lowvram.settings import Fidelity, Settings, knobs
from sd_lowvram.units import GIB, MIB

ENOUGH = 1.05
"""What a knob must gain to be a find: what is less hangs on roundings and on what is worth a trace."""

NUMBERS: dict[str, tuple[int, ...]] = {
    "attention_mib": (16, 256),
    "vae_strip_mib": (1, 32),
    "feed_forward_chunks": (2, 16),
    "residual_strips": (2, 16),
    "transformer_chunks": (2, 16),
    "weights_mib": (128, 512),
}
NO_WAYS = {
    "precision": "decided for all of these plans",
    "largest_mib": "a limit of the device",
    "deterministic": "asks more of the same ways",
    "compile": "what it gains is measured on the card, and unknown of one that is not here",
    "traced": "as compile",
    "streamed_graphs": "in no plan",
}
"""Knobs that are not asked for, and why."""


def ways() -> Iterator[dict[str, Any]]:
    """Each lossless knob at each of its values, or some of them where it is a number."""
    for name, knob in knobs().items():
        values = knob.choices or NUMBERS.get(name) or (True, False)
        for value in values if name not in NO_WAYS else ():
            if knob.fidelity_of(value) <= Fidelity.ROUNDING:
                yield {name: value}


@functools.cache
def _like(model: str, side: int) -> list[PlanSearch]:
    """The search that has priced this model at this size, if there was one: the next one begins with its traces."""
    return []


def planned(model: str, side: int, budget: int, card: str, **fixed: Any) -> Plan | None:
    """None: it does not fit, or cannot be."""
    anatomy = plan_baseline.anatomy(model)
    asked = request_for(anatomy, vram=budget, ram=64 * GIB, width=side, height=side, device="cuda", rates=profile(card))
    before = _like(model, side)
    try:
        search = PlanSearch(anatomy, asked, Settings(precision="fp16", **fixed), False, *before[:1])
        before[:] = before or [search]
        least = search.smallest()
        return plan_of(search) if least is not None and least.needed_bytes <= budget else None
    except LowVRAMError:
        return None


def finds(model: str, side: int, card: str, shares: tuple[float, ...]) -> Iterator[str]:
    """What is faster or smaller by hand, at budgets that are so far from the least to that of the plain model."""
    plain = planned(model, side, 64 * GIB, card)
    assert plain is not None
    least, most = plain.minimum_vram_bytes, plain.predicted.reserved_bytes + plain.predicted.overhead_bytes
    for share in shares:
        budget = least + int(share * (most - least))
        plan = planned(model, side, budget, card)
        assert plan is not None
        for fixed in ways():
            other = planned(model, side, budget, card, **fixed)
            if other is None:
                continue
            where = f"{model} {side} at {budget // MIB} MiB on {card}: {fixed}"
            if ENOUGH * other.predicted.seconds < plan.predicted.seconds:
                yield f"{where} {other.predicted.seconds:.1f} s instead of {plan.predicted.seconds:.1f}"
            if ENOUGH * other.minimum_vram_bytes < plan.minimum_vram_bytes:
                yield f"{where} from {other.minimum_vram_bytes // MIB} MiB on instead of {least // MIB}"


@pytest.mark.rare
@pytest.mark.slow(90)
def test_no_knob_by_hand_beats_the_plan() -> None:
    assert not list(finds("sd15", 512, "rtx3060", (0.1, 0.4)))


@pytest.mark.skipif(not os.environ.get("SD_LOWVRAM_BY_HAND"), reason="SD_LOWVRAM_BY_HAND=1 asks for it")
@pytest.mark.parametrize("card", ["rtx2060", "rtx3060", "rtx4060"])
@pytest.mark.parametrize(("model", "side"), [("sd15", 512), ("sd15", 768), ("sdxl", 1024)])
def test_no_knob_by_hand_beats_the_plan_anywhere(model: str, side: int, card: str) -> None:
    found = list(finds(model, side, card, (0.01, 0.05, 0.15, 0.35, 0.65, 1.0)))
    print(*found, sep="\n")
    assert not found


@pytest.mark.rare
@pytest.mark.slow(30)
@pytest.mark.parametrize(("model", "side", "budget_mib"), [("sd15", 512, 656), ("sdxl", 1024, 710)])
def test_layers_are_split_where_that_is_faster(model: str, side: int, budget_mib: int) -> None:
    plan = planned(model, side, budget_mib * MIB, "rtx2070")
    split = planned(model, side, budget_mib * MIB, "rtx2070", offload="layer", split_layers=True)
    assert plan is not None and split is not None
    assert plan.predicted.seconds <= 1.001 * split.predicted.seconds
    assert plan.minimum_vram_bytes <= split.minimum_vram_bytes


@pytest.mark.rare
@pytest.mark.slow(15)
def test_maps_are_parked_and_guidance_goes_in_turn_before_strips_are_at_their_smallest() -> None:
    """Sixteen strips of each map cost more launches than both of these together."""
    plan = planned("sd15", 512, 595 * MIB, "rtx2060")
    by_hand = planned("sd15", 512, 595 * MIB, "rtx2060", feed_forward_chunks=4, park_skips=True, guidance_in_turn=True)
    assert plan is not None and by_hand is not None
    assert plan.predicted.seconds <= 1.001 * by_hand.predicted.seconds


ORDERS: tuple[dict[str, Any], ...] = ({"channels_last": True}, {"channels_last": False})
IN_TURN: dict[str, Any] = {"offload": "layer", "park_skips": True, "guidance_in_turn": True}


@pytest.mark.rare
@pytest.mark.slow(30)
def test_what_is_offered_late_is_planned() -> None:
    """Each chunk copies the layers again, so that two are faster than more."""
    fixed = {"channels_last": True, "feed_forward_chunks": 2, "split_layers": True}
    plan = planned("sdxl", 1024, 680 * MIB, "rtx3060")
    by_hand = planned("sdxl", 1024, 680 * MIB, "rtx3060", **IN_TURN, **fixed)
    assert plan is not None and by_hand is not None
    assert plan.predicted.seconds <= 1.001 * by_hand.predicted.seconds


@pytest.mark.slow(10)
def test_the_least_has_convolutions_in_the_order_that_holds_less() -> None:
    least = [planned("sd15", 768, 64 * GIB, "rtx3060", **fixed) for fixed in ({}, *ORDERS)]
    needed = [plan.minimum_vram_bytes for plan in least if plan is not None]
    assert needed[0] == min(needed[1:])
