"""Two threads at one pipeline while weights stream: both are right, and nothing of either overtakes the other."""

from __future__ import annotations

import threading
from typing import Any

import families
import pytest
import torch
from on_card import GPU
from test_hooks_on_the_card import WAYS, denoise, run
from test_threads import beside
from torch import Tensor

from sd_lowvram import attached, trace

TIMES = 15


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


def decode(pipe: Any) -> Tensor:
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return pipe.vae.decode(latents.to(GPU), return_dict=False)[0].cpu()


@pytest.mark.slow(30)
@pytest.mark.parametrize("way", ["blocks, skips parked", "smallest"])
def test_a_decode_while_a_denoise_runs(gpu: Any, pipe: Any, way: str) -> None:
    decoded: list[Tensor] = []
    together = threading.Barrier(2)

    def decodes() -> None:
        for _ in range(TIMES):
            together.wait()
            decoded.append(decode(pipe))

    with gpu.watched("random") as seen, attached(pipe, WAYS[way], device=GPU):
        picture, latents = decode(pipe), denoise(pipe.unet, steps=1)
        other = threading.Thread(target=decodes)
        other.start()
        try:
            for _ in range(TIMES):
                together.wait()
                assert torch.equal(denoise(pipe.unet, steps=1), latents)
        finally:
            together.abort()  # an error here or there keeps nobody waiting
            other.join()
    assert len(decoded) == TIMES
    assert all(torch.equal(one, picture) for one in decoded)
    assert seen.clean, seen


@pytest.mark.parametrize("way", ["component", "blocks, skips parked", "smallest"])
def test_a_preview_and_a_trace_beside_a_run(gpu: Any, pipe: Any, way: str) -> None:
    latents = torch.zeros(1, 4, 8, 8)
    with gpu.watched("random") as seen, attached(pipe, WAYS[way], device=GPU):
        preview, picture, peak = decode(pipe), run(pipe, {}), trace(pipe.vae.decode, latents).peak_bytes
        with (
            beside(lambda: decode(pipe)) as previews,
            beside(lambda: trace(pipe.vae.decode, latents).peak_bytes) as peaks,
        ):
            assert all(torch.equal(run(pipe, {}), picture) for _ in range(2))
        assert previews and all(isinstance(one, Tensor) and torch.equal(one, preview) for one in previews), previews
        assert peaks and all(one == peak for one in peaks), peaks
        previews.clear()
    assert seen.clean, seen
