"""The largest size that fits: found with few trials, and the next larger one does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import request

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.max_size import RATIOS, largest, largest_plans
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import anatomy_of
from sd_lowvram.units import MIB


@given(st.integers(0, 400), st.integers(1, 50), st.integers(0, 20000), st.integers(1, 60), st.integers(1, 60))
def test_the_largest_number(fixed: int, slope: int, limit: int, guess: int, most: int) -> None:
    tried = []

    def needed(number: int) -> float:
        tried.append(number)
        return fixed + slope * number * number + 7 * (number // 5)

    found = largest(needed, limit, guess, most)
    assert found == max((number for number in range(1, most + 1) if needed(number) <= limit), default=0)
    assert len(tried) - most <= 8


def test_where_nothing_tells_how_much() -> None:
    assert largest(lambda number: 0 if number < 23 else float("inf"), 1, 5, 256) == 22


@pytest.mark.slow(10)
def test_the_next_larger_size_does_not_fit() -> None:
    anatomy = anatomy_of(families.parts("sd15")["unet"])
    asked = request(3 * MIB)
    plans: Any = largest_plans(anatomy, asked, Settings())
    assert set(plans) == set(RATIOS)
    for name, plan in plans.items():
        width, height = (8 * side for side in RATIOS[name])
        assert plan.request.width * height == plan.request.height * width
        larger = dataclasses.replace(asked, width=plan.request.width + width, height=plan.request.height + height)
        assert plan.predicted.peak_bytes + plan.predicted.overhead_bytes <= asked.vram >= plan.minimum_vram_bytes
        with pytest.raises(BudgetError):
            make_plan(anatomy, larger, Settings())


@pytest.mark.slow(10)
def test_the_largest_picture_of_a_pipeline_is_planned_by_its_own_call() -> None:
    pipe = families.plain("sd15")
    asked: dict[str, Any] = {"vram": "24MiB", "device": "cpu", "settings": Settings.policy("diffusers-default")}
    square = sd_lowvram.max_size(pipe, **asked)["square"]
    assert square is not None and square.request.rehearsal is not None
    side = square.request.width
    assert sd_lowvram.plan(pipe, width=side, height=side, **asked).predicted.peak_bytes <= 24 * MIB
    with pytest.raises(BudgetError):
        sd_lowvram.plan(pipe, width=side + 64, height=side + 64, **asked)
