"""cuDNN's attention where torch takes it by itself: not before it was measured what it holds, and counted then."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from on_card import GPU
from torch.nn.attention import SDPBackend, sdpa_kernel

import sd_lowvram
from sd_lowvram.devices.performance import THIS, profile
from sd_lowvram.devices.this_machine import knows_cudnn_attention, overhead_of
from sd_lowvram.kernels.attention import torch_kernels
from sd_lowvram.kernels.attention.registry import attend, available_backends
from sd_lowvram.planning import request

MIB = 1 << 20
FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.fixture
def preferred(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """torch takes cuDNN's kernel, as it does on newer cards, which holds half of its tensors' bytes besides; what is
    measured is remembered for one test."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    as_measured = dataclasses.replace(profile("rtx3060"), name=THIS)
    monkeypatch.setattr(request, "rates_of", lambda device: as_measured)
    monkeypatch.setattr(gpu.kernels, "attention_share", 0.5)
    known = knows_cudnn_attention, torch_kernels._own_kernel
    for one in known:
        one.cache_clear()
    with sdpa_kernel(FIRST, set_priority=True):
        yield
    for one in known:
        one.cache_clear()


def test_it_is_chosen_when_it_was_measured_and_its_bytes_are_counted(
    gpu: Any, preferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attended(backend: str) -> torch.Tensor:
        q = torch.zeros(2, 8, 1024, 64, dtype=torch.float16, device=GPU)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(backend, q, q, q)
        return torch.cuda.max_memory_allocated() - before

    assert available_backends(GPU)["cudnn"] is None
    tensors = 2 * 8 * 1024 * 64 * 2
    assert attended("sdpa") < 1.2 * tensors  # flash: its output, and a sum for each row
    assert attended("cudnn") >= 3 * tensors
    with monkeypatch.context() as patch:
        patch.setattr(gpu.kernels, "computes", False)
        measured = overhead_of(GPU, recalibrate=True)
    assert measured.attention_share is not None and 0.5 <= measured.attention_share < 0.53  # with a sum for each row
    assert attended("sdpa") >= 3 * tensors


def test_a_plan_leaves_attention_to_it_no_sooner(gpu: Any, preferred: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = families.plain("sd15").to(GPU, torch.float16)
    sizes: dict[str, Any] = {"vram": "4GB", "width": 64, "height": 64, "device": GPU}
    assert sd_lowvram.plan(pipe, **sizes).settings.attention == "sdpa"
    with monkeypatch.context() as patch:
        patch.setattr(gpu.kernels, "computes", False)
        overhead_of(GPU, recalibrate=True)
    assert sd_lowvram.plan(pipe, **sizes).settings.attention is None
