"""The trace against the allocator, of UNets with experts and regions in their outermost blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measure import FUSED, LAYERS, THREADS, UNET_HOOKS, Call, denoiser, denoiser_call, measure

from sd_lowvram.memory import kernels_of
from sd_lowvram.tracing import trace


def _changed(**settings: Any) -> Call:
    from sd_lowvram.unets.changes import BlockChanges
    from sd_lowvram.unets.cuts import whole
    from sd_lowvram.unets.prune import prune_unet

    unet = denoiser()
    changed = prune_unet(unet, whole(unet.config), BlockChanges(experts=2, regions=8))
    return denoiser_call(changed, 2, 32, 24)._replace(settings=settings)


CASES = {
    "experts and regions": _changed,
    "experts and regions, smallest": lambda: _changed(**UNET_HOOKS, **FUSED, **LAYERS),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    return measure(*CASES, file=__file__)


@pytest.mark.parametrize("name", CASES)
def test_the_trace_agrees_with_the_allocator(name: str, measured: dict[str, int]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        call = CASES[name]()
        with call.attached(), kernels_of("cpu"):
            traced = trace(call.function, *call.args).allocated_peak_bytes
    finally:
        torch.set_num_threads(before)
    assert abs(traced - measured[name]) <= max(0.02 * measured[name], 1 << 18), f"{traced} and {measured[name]} bytes"
