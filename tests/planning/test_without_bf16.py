"""Cards before Ampere have no products in bf16: what they make of a model in it is planned as float32, or where another
picture is allowed in fp16."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import todays
import torch

from sd_lowvram import Fidelity, Settings
from sd_lowvram.cache import remember
from sd_lowvram.devices.performance import PROFILES
from sd_lowvram.hooks.numbers.half_products import HalfProducts
from sd_lowvram.kernels.attention.backend import SCORE_BYTES
from sd_lowvram.planning.plan import Plan, StagePlan
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import anatomy_of
from sd_lowvram.units import GIB

CARD = dataclasses.replace(PROFILES["rtx2060"], launch_seconds=0.0)


def denoised(pipe: Any, dtype: torch.dtype, bf16: bool, side: int = 256) -> StagePlan:
    """A step's stage, planned without any saving."""
    anatomy = anatomy_of(pipe.to(dtype))
    rates = dataclasses.replace(CARD, bf16=bf16)
    request = request_for(anatomy, vram=GIB, ram=GIB, width=side, height=side, device="cuda", rates=rates)
    plan = make_plan(anatomy, request, Settings(offload="none", inference_mode=True))
    assert plan.settings.attention == ("sdpa" if dtype == torch.bfloat16 and not bf16 else None)
    return next(stage for stage in plan.stages if stage.name == "denoise")


def test_which_cards_have_none() -> None:
    assert {name for name, card in PROFILES.items() if not card.bf16} == {
        "gtx1060", "gtx1070", "gtx1080", "gtx1080-ti", "gtx1650", "rtx2060", "rtx2070", "rtx2080", "rtx2080-ti", "t4",
        "titan-rtx", "rx6600", "rx6600-xt", "rx6700-xt", "rx6800", "rx6800-xt", "rx6900-xt",
    }  # fmt: skip


@pytest.mark.slow(8)
def test_time_and_scores_are_those_of_float32() -> None:
    """Time is at the rate of float32, and scores are held, slice by slice."""
    pipe = todays.flux()
    slow, fast = (denoised(pipe, torch.bfloat16, bf16) for bf16 in (False, True))
    assert slow.seconds > 1.5 * fast.seconds
    scores = 4 * (512 + 256) ** 2 * torch.float32.itemsize  # of 4 heads, 512 tokens of text and 16 x 16 of the picture
    assert slow.activation_bytes - fast.activation_bytes > scores
    larger = [denoised(pipe, torch.bfloat16, bf16, 1024) for bf16 in (False, True)]
    assert larger[0].activation_bytes - larger[1].activation_bytes < 2 * SCORE_BYTES
    half = [denoised(pipe, torch.float16, bf16) for bf16 in (False, True)]
    assert half[0] == half[1]


def test_products_in_fp16_are_planned_where_another_picture_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of those that earlier runs found to overflow is that of float32."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    anatomy = anatomy_of(todays.z_image().to(torch.bfloat16))

    def planned(card: str, approximate: bool) -> Plan:
        rates = dataclasses.replace(PROFILES[card], launch_seconds=0.0)
        request = request_for(anatomy, vram=GIB, ram=GIB, width=256, height=256, device="cuda", rates=rates)
        return make_plan(anatomy, request, Settings(offload="none"), approximate)

    found = plain, half, newer = planned("rtx2060", False), planned("rtx2060", True), planned("rtx3060", True)
    assert [plan.settings.precision for plan in found] == [None, "fp16-products", None]
    assert (plain.fidelity.lossless, half.fidelity) == (True, Fidelity.APPROXIMATE)
    assert half.predicted.seconds < plain.predicted.seconds / 1.5
    assert any("products in fp16" in reason for reason in half.reasons)
    assert not any("products in fp16" in reason for plan in (plain, newer) for reason in plan.reasons)
    products = HalfProducts("transformer", anatomy.components["transformer"])
    remember(products.place, [path for path in products.layers if "feed_forward" in path])
    assert half.predicted.seconds < planned("rtx2060", True).predicted.seconds < plain.predicted.seconds
