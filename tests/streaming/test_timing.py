"""A streamed step's time has the program's part in it: launches, and what the engine does at each layer."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from sd_lowvram.devices.performance import profile
from sd_lowvram.streaming.simulator import CopyQueue
from sd_lowvram.streaming.timing import ModuleSpan, timing_of

MODEL = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
SPANS = [ModuleSpan(str(number), operators=1) for number in range(3)]


@pytest.mark.parametrize("queued", [True, False])
def test_layers_take_the_engine_time_and_others_none(queued: bool) -> None:
    rates = dataclasses.replace(profile("rtx4090"), queued=queued)
    timing = timing_of("unet", MODEL, SPANS, rates, 2, CopyQueue(1e9))
    first, between, last = (seconds for _, seconds in timing.spans)
    assert [path for path, _ in timing.spans] == ["unet.0", "unet.1", "unet.2"]
    assert between == pytest.approx(rates.launch_seconds)
    assert first == last == pytest.approx((1 + rates.layer_launches) * rates.launch_seconds)


def test_work_hides_the_program() -> None:
    rates = profile("rtx4090")
    large = [dataclasses.replace(span, flops=10**13) for span in SPANS]
    timing = timing_of("unet", MODEL, large, rates, 2, CopyQueue(1e9))
    assert sum(seconds for _, seconds in timing.spans) == pytest.approx(3e13 / rates.half_flops, rel=0.001)
