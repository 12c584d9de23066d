"""Streamed weights on a GPU: the same bits as resident ones, the bytes of the plan, nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from settled import host_weights_of

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.units import MIB
from sd_lowvram.weights import weight_bytes

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
STREAMED: dict[str, dict[str, Any]] = {
    "half of the blocks": {"offload": "blocks", "weights_mib": 820},
    "a tenth of the blocks": {"offload": "blocks", "weights_mib": 164},
    "halves": {"offload": "halves"},
    "layers": {"offload": "layer"},
    "components": {"offload": "component"},
}


@pytest.fixture(scope="module")
def unet() -> Any:
    return build_components("sd15", dtype=torch.float16, device="cuda", only=("unet",))["unet"].to("cpu")


def denoise(unet: Any, steps: int = 3) -> torch.Tensor:
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, 64, 64, generator=noise).half().to(GPU)
    text = torch.randn(2, 77, 768, generator=noise).half().to(GPU)
    with torch.inference_mode():
        for step in range(steps):
            latents = latents - 0.1 * unet(latents, torch.tensor(900 - step, device=GPU), text, return_dict=False)[0]
    return latents.cpu()


@pytest.fixture(scope="module")
def resident(unet: Any) -> torch.Tensor:
    with attached(unet, Settings(offload="none", deterministic=True), device=GPU):
        return denoise(unet)


@pytest.mark.parametrize("way", STREAMED)
def test_the_same_bits_as_resident(unet: Any, resident: torch.Tensor, way: str) -> None:
    with attached(unet, Settings(deterministic=True, **STREAMED[way]), device=GPU):
        assert torch.equal(denoise(unet), resident)
        assert torch.equal(denoise(unet), resident)  # the second run goes in the order that the first one showed


@pytest.mark.parametrize("way", ["half of the blocks", "a tenth of the blocks"])
def test_no_more_than_the_room_is_on_the_device(unet: Any, way: str) -> None:
    def peak(settings: Settings) -> int:
        with attached(unet, settings, device=GPU):
            denoise(unet, 1)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            denoise(unet, 2)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()

    activations = peak(Settings(offload="none")) - weight_bytes(unet)
    assert peak(Settings(**STREAMED[way])) <= STREAMED[way]["weights_mib"] * MIB + activations + 2 * MIB


def test_nothing_stays_on_the_device(unet: Any) -> None:
    denoise_base = torch.cuda.memory_allocated()
    with attached(unet, Settings(offload="blocks", weights_mib=400), device=GPU):
        denoise(unet, 1)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= denoise_base
    assert {tensor.device.type for tensor in unet.parameters()} == {"cpu"}


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_eight_bits_stream_too(unet: Any, resident: torch.Tensor, kind: str) -> None:
    with attached(unet, Settings(weight_storage=kind, deterministic=True, offload="none"), device=GPU):
        expected = denoise(unet)
    with attached(unet, Settings(weight_storage=kind, deterministic=True, offload="layer"), device=GPU):
        assert torch.equal(denoise(unet), expected)
    off = (expected.double() - resident.double()).norm() / resident.double().norm()
    assert 0 < off < 0.1


@pytest.mark.parametrize("ram", [0, 64 * MIB, 1 << 40])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_masters_arrive_whole(ram: int, where: str) -> None:
    noise = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=noise).half().to(where) for shape in [(7,), (3000, 4096), (64, 32, 3, 3)]]
    wanted = [tensor.cpu() for tensor in tensors]
    host_weights = host_weights_of(tensors, ram, GPU)
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    pinned = all(tensor.is_pinned() for tensor in tensors)
    assert pinned or ram < 1 << 30
    assert host_weights.ring_bytes == 0  # all is pinned, or there is no memory for a ring either
    stream = torch.cuda.Stream()
    for _ in range(3):
        targets = [torch.zeros_like(tensor, device=GPU) for tensor in tensors]
        stream.wait_stream(torch.cuda.current_stream())
        for tensor, target in zip(tensors, targets, strict=True):
            host_weights.copy_to(tensor.data, target, stream)
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(target.cpu(), want) for target, want in zip(targets, wanted, strict=True))
    host_weights.undo()
    assert all(tensor.device.type == where for tensor in tensors)


def test_copies_do_not_wait_for_the_compute() -> None:
    """A copy that is issued while a long kernel runs is done before it."""
    host = torch.ones(8 * MIB, pin_memory=True)
    host_weights = host_weights_of([host], 1 << 40, GPU)
    target, square = torch.zeros(8 * MIB, device=GPU), torch.randn(8192, 8192, device=GPU)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    copied = torch.cuda.Event()

    def work() -> torch.Tensor:
        return square @ square

    work()
    torch.cuda.synchronize()
    for _ in range(20):
        work()
    done.record()
    host_weights.copy_to(host.data, target, stream)
    copied.record(stream)
    copied.synchronize()
    assert not done.query()
    torch.cuda.synchronize()
