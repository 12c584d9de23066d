"""Plans that stream weights: what they choose, and that the engine holds and does what they say."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import tiny
import torch

from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.patches import Change
from sd_lowvram.planning.cost_model import Pricing
from sd_lowvram.planning.plan import Request
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import attached
from sd_lowvram.streaming.timing import Timing
from sd_lowvram.units import GIB, MIB
from sd_lowvram.weights import weight_bytes

GPU = torch.device("cuda")
RATES = dataclasses.replace(profile("rtx2070"), half_flops=8e10, float_flops=8e10, copy_bandwidth=1.2e9)
"""As much slower than the card as the model is smaller, so that copies matter as much."""


CONFIG = tiny.config("sd15")
CONFIG["unet"] |= {"block_out_channels": [64, 128, 256, 256]}


@pytest.fixture(scope="module")
def anatomy() -> Any:
    """The topology of SD1.5 with some 70 MiB of weights in the UNet."""
    return anatomy_of_components("diffusers", build_components(CONFIG, torch.float16, "meta", only=("unet",)))


def request(vram: int, size: int = 128) -> Request:
    return Request(size, size, 1, vram, 4 * GIB, GPU, RATES)


def planned(anatomy: Any, settings: Settings, vram: int = 8 * GIB) -> Any:
    return make_plan(anatomy, request(vram), settings)


def denoising(plan: Any) -> Any:
    return next(stage for stage in plan.stages if stage.name == "denoise")


def test_between_layers_and_components_it_streams_blocks(anatomy: Any) -> None:
    layer, component = (planned(anatomy, Settings(offload=offload)) for offload in ("layer", "component"))
    needs = [one.predicted.peak_bytes + one.predicted.overhead_bytes for one in (layer, component)]
    assert needs[0] < needs[1] - 8 * MIB
    plan = planned(anatomy, Settings(), (needs[0] + needs[1]) // 2)
    assert plan.settings.offload == "blocks" and plan.settings.weights_mib is not None
    assert component.predicted.seconds * 0.9 < plan.predicted.seconds < layer.predicted.seconds
    assert 1 <= denoising(plan).slowdown < denoising(layer).slowdown
    assert any("streamed under the compute" in reason for reason in plan.reasons)
    assert plan.timing is not None and "timing" not in plan.as_dict()
    assert denoising(plan).weights_bytes <= plan.settings.weights_mib * MIB


def test_more_room_is_faster(anatomy: Any) -> None:
    pricing = Pricing(anatomy, request(8 * GIB))
    stage = pricing.costs.stages[0]
    total = weight_bytes(anatomy.unet) // MIB
    rooms = [total // 4, total // 2, total * 3 // 4, total + 2]
    steps = [pricing.step(stage, Settings(offload="blocks", weights_mib=room)) for room in rooms]
    assert all(step.device_bytes <= room * MIB for step, room in zip(steps, rooms, strict=True))
    assert all(more.seconds <= less.seconds * 1.001 for less, more in itertools.pairwise(steps))
    assert steps[-1].streamed_bytes == 0 and steps[-1].seconds < 0.9 * steps[0].seconds


def test_a_room_alone_asks_for_blocks(anatomy: Any) -> None:
    total = weight_bytes(anatomy.unet) // MIB
    plan = planned(anatomy, Settings(weights_mib=total // 2))
    assert (plan.settings.offload, plan.settings.weights_mib) == ("blocks", total // 2)


@pytest.mark.parametrize(
    ("offload", "fixed"),
    [
        ("blocks", {}),
        ("blocks", {"transformer_chunks": 4, "residual_strips": 4, "guidance_in_turn": True}),
        ("halves", {}),
        ("layer", {}),
    ],
)
def test_the_engine_holds_what_the_plan_says(anatomy: Any, offload: str, fixed: dict[str, Any]) -> None:
    room = weight_bytes(anatomy.unet) // MIB // 3 if offload == "blocks" else None
    settings = Settings(offload=offload, weights_mib=room, inference_mode=True, **fixed)
    pricing = Pricing(anatomy, request(8 * GIB))
    for stage in pricing.costs.stages:
        one = pricing.stage(settings, stage, {}, settings)
        timing = pricing.timing(stage, settings) if stage.repeats else None
        traced = pricing.costs(stage, pricing.as_traced(stage, settings), timing)
        assert traced.peak_bytes <= one.peak_bytes
        if stage.repeats:
            assert traced.peak_bytes == one.peak_bytes
            copied, step = traced.copied_bytes - one.parked_bytes, pricing.step(stage, settings)
            # what is read ahead into the ring, and little that strips fetch again
            assert (
                0 <= copied - step.staying_bytes - step.streamed_bytes <= step.device_bytes + step.streamed_bytes // 20
            )


def test_the_engine_keeps_the_schedule_of_the_plan(anatomy: Any) -> None:
    """The blocks that stay are those of the search over the plan's times, not those of a search without."""
    room = weight_bytes(anatomy.unet) // MIB // 3
    plan = planned(anatomy, Settings(offload="blocks", weights_mib=room))
    unet = build_components(CONFIG, dtype=torch.float16, only=("unet",))["unet"]

    def residents(timing: Timing | None) -> set[str]:
        with attached(unet, Settings(offload="blocks", weights_mib=room), device="cpu", timing=timing) as attachment:
            stream = next(step for step in attachment._steps if isinstance(step, Change)).apply.__self__
            layout = stream._layout
            return {layout.blocks[number].name for number in layout.residents}

    assert residents(plan.timing) != residents(None)


def test_too_little_room_is_refused(anatomy: Any) -> None:
    with pytest.raises(BudgetError, match="give it more, or let layers be split"):
        planned(anatomy, Settings(offload="blocks", weights_mib=1))
