"""The simulated card itself: what is wrong on a card is wrong on it, and what is right there is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_card import GPU, SCHEDULES
from torch import nn

MIB = 1 << 20
STEPS = 4


def to_the_device_and_back(ordered: bool) -> torch.Tensor:
    """A number goes to the device on a stream of its own, is doubled in another, and comes back."""
    host = torch.ones(1024).pin_memory()
    there, copies = torch.zeros(1024, device=GPU), torch.cuda.Stream()
    if ordered:
        copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        there.copy_(host, non_blocking=True)
    if ordered:
        torch.cuda.current_stream().wait_stream(copies)
    back = torch.zeros(1024).pin_memory()  # memory of before may hold the right answer
    back.copy_(there * 2, non_blocking=True)
    if ordered:
        torch.cuda.current_stream().synchronize()
    return back.clone()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_events_order_is_right_in_every_schedule(gpu: Any, schedule: str) -> None:
    with gpu.watched(schedule) as seen:
        result = to_the_device_and_back(ordered=True)
    assert torch.equal(result, torch.full((1024,), 2.0))
    del result
    assert seen.clean, seen


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_nothing_orders_is_a_race_in_every_schedule(gpu: Any, schedule: str) -> None:
    with gpu.watched(schedule) as seen:
        result = to_the_device_and_back(ordered=False)
    assert seen.races
    if schedule == "lazy":
        assert not torch.equal(result, torch.full((1024,), 2.0))


def test_memory_that_is_given_to_another_stream_too_early_is_a_race(gpu: Any) -> None:
    def reuse(told: bool) -> None:
        copies, host = torch.cuda.Stream(), torch.ones(4 * MIB).pin_memory()
        there = torch.empty(4 * MIB, device=GPU)
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            there.copy_(host, non_blocking=True)
        if told:
            there.record_stream(copies)
        del there
        torch.empty(4 * MIB, device=GPU).fill_(0)

    with gpu.watched("lazy") as seen:
        reuse(told=True)
    assert seen.clean, seen
    with gpu.watched("lazy") as seen:
        reuse(told=False)
    assert seen.races


def test_kernels_give_what_the_processor_gives(gpu: Any) -> None:
    noise = torch.Generator().manual_seed(0)
    image = torch.randn(2, 8, 12, 12, generator=noise)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Upsample(scale_factor=2))
    layers.append(nn.Conv2d(16, 16, 3, stride=2)).requires_grad_(False)
    expected = layers(image)
    layers.to(GPU)
    with gpu.watched() as seen:
        assert torch.equal(layers(image.to(GPU)).cpu(), expected)
        last = image.to(GPU, memory_format=torch.channels_last)
        assert layers[0](last).is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(layers(last).cpu(), expected, atol=1e-5)
        del last
    assert seen.clean, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_the_fused_kernels(gpu: Any, dtype: torch.dtype, causal: bool) -> None:
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, generator=noise) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with gpu.watched() as seen:
        on_card = [one.to(GPU, dtype) for one in (q, k, v)]
        result = torch.nn.functional.scaled_dot_product_attention(*on_card, is_causal=causal).float().cpu()
        del on_card
    assert torch.allclose(result, expected, atol=1e-5 if dtype is torch.float32 else 3e-3)
    assert seen.clean, seen


def test_a_card_runs_out_at_its_size(gpu: Any) -> None:
    held: list[torch.Tensor] = []
    torch.cuda.empty_cache()
    with gpu.card.of_size(512 * MIB, context=100 * MIB):
        free, total = torch.cuda.mem_get_info()
        assert (free, total) == (412 * MIB - gpu.card.used, 512 * MIB)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            while True:
                held.append(torch.empty(20 * MIB, dtype=torch.uint8, device=GPU))
        assert len(held) == free // (20 * MIB)
        held.clear()
        torch.cuda.empty_cache()


@pytest.mark.parametrize(("workspace", "least"), [("none", 0), ("nhwc", 2), ("fixed", 128)])
def test_a_convolution_library_takes_what_it_is_said_to(gpu: Any, workspace: str, least: int) -> None:
    image = torch.zeros(1, 32, 128, 256, dtype=torch.float16, device=GPU)  # 2 MiB
    layer = nn.Conv2d(32, 1, 1).half().to(GPU).requires_grad_(False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gpu.kernels.workspace = workspace
    try:
        layer(image)
    finally:
        gpu.kernels.workspace = "none"
    taken = torch.cuda.max_memory_allocated() - before
    assert least * MIB <= taken < least * 1.1 * MIB + MIB // 2 + (2 * MIB if workspace == "nhwc" else 0)


def graphed(layers: nn.Module, given: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.stream(torch.cuda.current_stream())  # torch does not return to it from a failed capture
    with torch.inference_mode(), current, torch.cuda.graph(graph):
        made = layers(given)
    return graph, made


def test_a_graph_computes_anew_and_allocates_nothing(gpu: Any) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(inplace=True), nn.Conv2d(8, 4, 3, padding=1)
    )
    layers.to(GPU).requires_grad_(False)
    given = torch.zeros(1, 4, 8, 8, device=GPU)
    graph, made = graphed(layers, given)
    before, blocks = gpu.card.allocations, torch.cuda.memory_stats()["allocation.all.allocated"]
    pictures = torch.randn(STEPS, 1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for picture in pictures:
        given.copy_(picture)
        replays = gpu.card.replays
        graph.replay()
        assert gpu.card.replays == replays + 1
        results.append(made.cpu())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == blocks
    assert gpu.card.allocations == before
    for picture, result in zip(pictures, results, strict=True):
        with torch.inference_mode():
            assert torch.equal(result, layers(picture.to(GPU)).cpu())


def other_than(stream: torch.cuda.Stream, streams: tuple[torch.cuda.Stream, ...]) -> torch.cuda.Stream:
    """One of ``streams`` that is not ``stream``: torch gives 32 in turn, and a new one may be that of the capture."""
    return next(other for other in streams if other != stream)


def branched(weights: torch.Tensor, held: torch.Tensor, waits: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Multiply by weights that another stream of the capture copies: right if the product ``waits`` for them."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def multiply(given: torch.Tensor) -> torch.Tensor:
        home = torch.cuda.current_stream()
        copies = other_than(home, streams)
        copies.wait_stream(home)
        with torch.cuda.stream(copies):
            weights.copy_(held, non_blocking=True)
        if waits:
            home.wait_stream(copies)
        made = given * weights
        home.wait_stream(copies)
        return made

    return multiply


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", [True, False])
def test_a_graph_keeps_the_streams_that_it_was_captured_from(gpu: Any, schedule: str, waits: bool) -> None:
    held, weights = torch.full((4096,), 3.0).pin_memory(), torch.zeros(4096, device=GPU)
    given = torch.ones(4096, device=GPU)
    graph, made = graphed(branched(weights, held, waits), given)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    with gpu.watched(schedule) as seen:
        for _ in range(STEPS):
            graph.replay()
        result = made.cpu()
    assert seen.clean is waits, seen
    assert torch.equal(result, torch.full((4096,), 3.0)) or not waits


def test_a_capture_refuses_work_that_nothing_waits_for(gpu: Any) -> None:
    streams, given = (torch.cuda.Stream(), torch.cuda.Stream()), torch.ones(4, device=GPU)

    def forks(given: torch.Tensor) -> torch.Tensor:
        capturing = torch.cuda.current_stream()
        copies = other_than(capturing, streams)
        copies.wait_stream(capturing)
        with torch.cuda.stream(copies):
            return given + 1

    with pytest.raises(RuntimeError, match="unjoined"):
        graphed(forks, given)  # type: ignore[arg-type]
    assert torch.equal((given + 1).cpu(), torch.full((4,), 2.0))


def test_a_capture_refuses_to_wait_for_an_event_of_before(gpu: Any) -> None:
    before, given = torch.cuda.Event(), torch.ones(4, device=GPU)
    before.record()

    def follows(given: torch.Tensor) -> torch.Tensor:
        torch.cuda.current_stream().wait_event(before)
        return given + 1

    with pytest.raises(RuntimeError, match="previous error during capture") as error:
        graphed(follows, given)  # type: ignore[arg-type]
    assert "dependency created on uncaptured work" in str(error.value.__context__)
    assert torch.equal((given + 1).cpu(), torch.full((4,), 2.0))


def test_a_capture_refuses_to_wait_for_the_device(gpu: Any) -> None:
    def waits(given: torch.Tensor) -> torch.Tensor:
        return given * given.sum().item()

    with pytest.raises(RuntimeError, match="captur"):
        graphed(waits, torch.ones(4, device=GPU))  # type: ignore[arg-type]
    assert torch.equal((torch.ones(4, device=GPU) + 1).cpu(), torch.full((4,), 2.0))
