"""What waits in host memory is page-locked at its size, within the plan, and given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from on_card import GPU
from run_log import logged
from test_hooks_on_the_card import mapped, run

import sd_lowvram
from sd_lowvram import Settings, attached, trace
from sd_lowvram.devices.info import Memory
from sd_lowvram.devices.performance import profile
from sd_lowvram.memory import fetch, host_empty, park, pinned
from sd_lowvram.memory.pinned_buffers import PINNED_BUFFERS
from sd_lowvram.planning import request
from sd_lowvram.streaming.host_weights import RING_BYTES, HostWeights, host_budget, mapped_bytes
from sd_lowvram.weights import weight_bytes

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def before(gpu: Any) -> Iterator[int]:
    """What is locked when a test begins, and when it ends."""
    _, start = gpu.held()
    gpu.card.reset_peaks()
    yield start
    assert gpu.held()[1] == start


@pytest.mark.parametrize("size", [1, PAGE, 33 * MIB, 65 * MIB + 1])
def test_nothing_is_rounded_up(gpu: Any, before: int, size: int) -> None:
    tensor = host_empty([size], torch.uint8)
    assert tensor.is_pinned() and tensor[size // 2 :].is_pinned()
    assert size <= gpu.card.pinned - before < size + PAGE


def test_rooms_of_maps_are_used_again_and_are_never_more_than_maps_were(gpu: Any, before: int) -> None:
    small, large = (torch.rand(1, 4, side, side, device=GPU) for side in (64, 128))
    with gpu.watched("lazy") as seen, PINNED_BUFFERS.keep():
        for _ in range(3):
            maps = [park(small), park(small), park(large)]
            there = gpu.card.pinned
            backs = [fetch(one).cpu() for one in maps]
            assert all(map(torch.equal, backs, [one.cpu() for one in (small, small, large)]))
            maps.clear()
            assert gpu.card.pinned == there
        assert gpu.card.pinned_peak - before == 2 * small.nbytes + large.nbytes
        between = park(torch.rand(1, 4, 32, 32, device=GPU))
        assert gpu.card.pinned - before <= 2 * small.nbytes + large.nbytes
        del between
    assert seen.clean, seen
    assert gpu.card.pinned == before


PARKED = Settings(vae_tiles="exact", vae_map="parked", vae_strip_mib=1, offload="none")


@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_a_second_decode_finds_its_pages_locked(
    gpu: Any, before: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as many as a plan counts for parked maps, which have several sizes."""
    locked: list[int] = []
    lock = pinned._lock
    monkeypatch.setattr(pinned, "_lock", lambda address, size: locked.append(size) or lock(address, size))
    vae = tiny.tiniest().vae
    latents = torch.randn(1, 4, 20, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached(vae, PARKED, device="cpu"):
        parked = trace(vae.decode, latents).host_peak_bytes
    with gpu.watched(schedule) as seen, torch.no_grad(), attached(vae, PARKED, device=GPU):
        first, again = (vae.decode(latents.to(GPU)).sample.cpu() for _ in range(2))
        assert len(locked) == 1 and parked <= locked[0] < parked + PAGE
    assert torch.equal(first, again) and tiny.relative_error(again, vae.decode(latents).sample) < 1e-5
    assert seen.clean, seen


def test_weights_that_wait_are_pinned_in_place_of_what_a_decode_left(
    gpu: Any, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PINNED_BUFFERS.keep():
        park(torch.rand(1, 4, 128, 128, device=GPU))
        most = pinned.pinned_bytes() + PAGE
        monkeypatch.setattr(pinned, "most_pinned_bytes", lambda: most)
        weights = host_empty([4 * PAGE], torch.uint8)
        assert weights.is_pinned()


def in_a_circle(nbytes: int) -> None:
    """Pinned pages that the garbage collector alone will find."""
    circle: list[Any] = [host_empty([nbytes], torch.uint8)]
    circle.append(circle)


def test_the_garbage_collector_waits_for_no_device(gpu: Any, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(pinned, "_wait", lambda: waits.append(1))
    in_a_circle(5 * MIB)
    in_a_circle(3 * MIB)
    gc.collect()
    assert gpu.card.pinned - before == 8 * MIB and not waits
    assert pinned.pinnable_bytes() > 0
    assert gpu.card.pinned == before and waits == [1]


def test_pages_may_end_while_kernels_are_recorded(gpu: Any, before: int) -> None:
    """A device that is waited for ends a recording on it, in whichever thread."""
    value = torch.zeros(4, device=GPU)
    threads = ThreadPoolExecutor(1)
    for another in (False, True):
        graph, tensor = torch.cuda.CUDAGraph(), host_empty([5 * MIB], torch.uint8)
        with pinned.recording(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            value.add_(1)
            del tensor
            threads.submit(pinned.pinnable_bytes).result() if another else pinned.pinnable_bytes()
        graph.replay()
        assert gpu.card.pinned - before == 5 * MIB
        pinned.unlock_ended()
        assert gpu.card.pinned == before
    assert value.tolist() == [2.0] * 4


def test_pages_may_end_while_others_record_kernels(gpu: Any, before: int) -> None:
    value = torch.zeros(4, device=GPU)
    graph, tensor = torch.cuda.CUDAGraph(), host_empty([5 * MIB], torch.uint8)
    with torch.cuda.graph(graph):
        value.add_(1)
        del tensor
        assert pinned.pinnable_bytes() > 0
    graph.replay()
    assert value.tolist() == [1.0] * 4


def test_masters_are_pinned_at_their_size(gpu: Any, before: int) -> None:
    tensors = [torch.rand(size) for size in (3 * MIB, 33 * MIB + 7, 5, 40 * MIB)]
    wanted = [tensor.clone() for tensor in tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    host_weights = HostWeights(GPU)
    host_weights.add(tensors)
    assert all(tensor.is_pinned() for tensor in tensors)
    assert total <= gpu.card.pinned - before < total + 8 * PAGE
    assert gpu.card.pinned_peak == gpu.card.pinned
    there = [torch.empty_like(tensor, device=GPU) for tensor in tensors]
    for tensor, copy in zip(tensors, there, strict=True):
        host_weights.copy_to(tensor.data, copy)
    host_weights.undo()
    assert gpu.card.pinned == before
    assert not any(tensor.is_pinned() for tensor in tensors)
    for tensor, copy, want in zip(tensors, there, wanted, strict=True):
        assert torch.equal(tensor, want) and torch.equal(copy.cpu(), want)


RUNS: dict[str, Settings] = {
    "component": Settings(offload="component"),
    "layers": Settings(offload="layer", vae_tiles="exact", vae_map="parked", vae_strip_mib=1),
    "blocks": Settings(offload="blocks", weights_mib=8, guidance_in_turn=True, park_skips=True),
}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


@pytest.mark.parametrize("ram", [RING_BYTES // 4 * 3, RING_BYTES + 8 * MIB, 512 * MIB])
@pytest.mark.parametrize("way", RUNS)
def test_a_run_locks_no_more_than_planned(
    gpu: Any, before: int, pipe: Any, way: str, ram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))  # nothing is measured here
    plain = run(pipe, {})
    plan = sd_lowvram.optimize(pipe, vram="2GB", ram=f"{ram} b", width=64, height=64, device=GPU, settings=RUNS[way])
    gpu.card.reset_peaks()
    made = [run(pipe, {}) for _ in range(2)]
    locked = gpu.card.pinned_peak - before
    assert torch.equal(*made) and (made[0] - plain).abs().max() < 1e-3
    assert locked <= ram
    assert locked <= plan.predicted.host_bytes * 1.02
    if ram == 512 * MIB:
        assert locked >= plan.predicted.host_bytes * 0.9
    sd_lowvram.restore(pipe)
    assert gpu.held()[1] == before
    assert not any(tensor.is_pinned() for tensor in pipe.unet.parameters())


@pytest.mark.rare
@pytest.mark.parametrize("way", [*RUNS, "mapped blocks"])
def test_ten_pictures_hold_no_more_than_the_second(
    gpu: Any, before: int, pipe: Any, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import StableDiffusionPipeline
    from host_memory import anonymous_bytes

    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))
    mapping, _, name = way.rpartition(" ")
    if mapping:
        pipe.save_pretrained(tmp_path)
        pipe = StableDiffusionPipeline.from_pretrained(tmp_path)
        pipe.set_progress_bar_config(disable=True)
    sd_lowvram.optimize(pipe, vram="2GB", ram="512MB", width=64, height=64, device=GPU, settings=RUNS[name])
    locked, own = [], []
    for _ in range(10):
        run(pipe, {})
        gc.collect()
        locked.append((gpu.card.pinned, gpu.card.pinned_peak))
        own.append(anonymous_bytes())
    sd_lowvram.restore(pipe)
    assert len(set(locked[1:])) == 1
    assert max(own) <= own[1] + 8 * MIB


def test_a_mapped_file_needs_the_ring_alone(gpu: Any, before: int, pipe: Any, tmp_path: Path) -> None:
    pipe.unet.save_pretrained(tmp_path)
    with mapped(tmp_path) as unet, host_budget(RING_BYTES + 3 * MIB):
        host_weights = HostWeights(GPU)
        host_weights.add(unet.parameters())
        assert RING_BYTES < gpu.card.pinned_peak - before <= RING_BYTES + 3 * MIB
        host_weights.undo()


@pytest.mark.parametrize("way", ["component", "blocks"])
def test_weights_in_a_mapped_file_take_what_ram_is_left_to_them(
    gpu: Any, before: int, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What does not fit stays in the file, also kernels that come channels last: the ring alone would do for
    the pictures to be the same."""
    from diffusers import StableDiffusionPipeline

    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))
    pipe.save_pretrained(tmp_path)
    small = StableDiffusionPipeline.from_pretrained(tmp_path)
    small.set_progress_bar_config(disable=True)
    sizes: dict[str, Any] = {"vram": "2GB", "width": 64, "height": 64, "device": GPU}
    sizes["settings"] = RUNS[way].filled(channels_last=True)
    least, pictures = sd_lowvram.plan(small, ram="1GB", **sizes).minimum_ram_bytes, []
    parts = [small.unet, small.vae, small.text_encoder]
    assert RING_BYTES <= least < RING_BYTES + weight_bytes(*parts)
    for ram in (least, least + MIB, 512 * MIB):
        plan = sd_lowvram.optimize(small, ram=f"{ram} b", **sizes)
        gpu.card.reset_peaks()
        with gpu.watched("lazy") as seen:
            pictures.append(run(small, {}))
        if ram == least:  # as it was predicted
            held = weight_bytes(*parts) - mapped_bytes(*parts) + RING_BYTES
            assert held <= ram + MIB // 4 and (held > ram - MIB // 2 or plan.settings.park_skips)
        assert plan.predicted.host_bytes <= ram
        assert gpu.card.pinned_peak - before <= plan.predicted.host_bytes * 1.02
        assert not seen.races and not seen.unsimulated, seen
        sd_lowvram.restore(small)
    assert torch.equal(pictures[0], pictures[1]) and torch.equal(pictures[0], pictures[2])


def test_what_cannot_be_locked_is_told_once_and_waits_in_ordinary_memory(
    gpu: Any, before: int, pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_told", set())
    settings = RUNS["blocks"]
    with sd_lowvram.attached(pipe, settings, device=GPU):
        wanted = run(pipe, {})
    with (
        gpu.card.pinning(0),
        logged("not page-locked.*out of memory") as told,
        gpu.watched("lazy") as seen,
        sd_lowvram.attached(pipe, settings, device=GPU),
    ):
        assert torch.equal(run(pipe, {}), wanted)
    assert seen.clean, seen
    assert len(told) == 1


def test_no_more_than_a_share_of_the_host_is_locked(gpu: Any, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "_told", set())
    monkeypatch.setattr(pinned, "host_memory", lambda: Memory(64 * MIB, 64 * MIB))
    tensor = torch.rand(5 * MIB, device=GPU)
    with PINNED_BUFFERS.keep(), logged("more than 50% of the RAM"):
        maps = [park(tensor) for _ in range(3)]
        assert gpu.card.pinned - before == tensor.nbytes
        assert all(torch.equal(fetch(one), tensor) for one in maps)
        maps.clear()
        del maps
