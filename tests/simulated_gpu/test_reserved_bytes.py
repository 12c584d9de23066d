"""What plans say of torch's allocator is what it does; and a plan runs on a card that gives just what was planned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_card import GPU
from plans_on_card import on_card

from sd_lowvram.devices.calibration import measured_overhead
from sd_lowvram.memory.caching_allocator import CachingAllocator

MIB = 1 << 20


@pytest.fixture
def max_split_mib(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.cuda.memory._set_allocator_settings(f"max_split_size_mb:{request.param}")
    yield request.param
    torch.cuda.memory._set_allocator_settings("max_split_size_mb:1000000")


def a_size(choice: random.Random) -> int:
    low, high = choice.choice([(1, MIB), (1, MIB), (MIB, 10 * MIB), (10 * MIB, 64 * MIB), (64 * MIB, 300 * MIB)])
    return choice.randint(low, high)


@pytest.mark.parametrize("max_split_mib", [1_000_000, 64], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_segments_are_taken_as_by_torch(gpu: Any, seed: int, max_split_mib: int) -> None:
    choice, live = random.Random(seed), {}
    with gpu.card.of_size(16 << 30):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        model = CachingAllocator(max_split_bytes=max_split_mib * MIB)
        for number in range(1000):
            if live and (choice.random() < 0.5 or model.allocated_bytes > 1500 * MIB):
                tensor, block = live.pop(choice.choice(list(live)))
                del tensor
                model.free(block)
            else:
                size = a_size(choice)
                live[number] = torch.empty(size, dtype=torch.uint8, device=GPU), model.allocate(size)
            if number % 400 == 399:
                torch.cuda.empty_cache()
                model.release()
            held = torch.cuda.memory_reserved() - before[0], torch.cuda.memory_allocated() - before[1]
            assert held == (model.reserved_bytes, model.allocated_bytes)


@pytest.mark.parametrize(("model", "side", "share"), [("sd15", 512, 0.0), ("sd15", 512, 0.3), ("sd15", 1024, 0.3)])
def test_a_plan_runs_on_a_card_of_its_size(gpu: Any, model: str, side: int, share: float) -> None:
    row = on_card(gpu, model, side, share)
    assert row.ran
    assert 0 <= row.planned_reserved - row.reserved <= max(2 * MIB, row.reserved // 50)
    assert abs(row.planned_peak - row.peak) <= max(2 * MIB, row.peak // 50)


def test_a_library_that_takes_much_is_measured_and_the_run_ends(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plan, or with a leaner one where the library's workspaces break the places of tensors up."""
    monkeypatch.setattr(gpu.kernels, "workspace", "fixed")
    monkeypatch.setattr(gpu.kernels, "computes", False)
    seen = measured_overhead(GPU).convolution_bytes
    assert 128 * MIB <= seen < 130 * MIB
    row = on_card(gpu, "sd15", 512, 0.3, workspace_bytes=seen)
    assert row.reserved <= row.planned_reserved + seen
