"""Weights in a mapped file are read during the compute; what goes wrong there is raised where they are waited for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from on_card import GPU
from safetensors.torch import load_file, save_file
from test_hooks_on_the_card import WAYS, denoise, mapped
from torch import Tensor

from sd_lowvram import attached
from sd_lowvram.streaming.copier import Copied, Copier
from sd_lowvram.streaming.host_weights import HostWeights, _Ring, host_budget

SECONDS = 60
"""The longest that anything here may wait."""


@pytest.fixture
def sources(tmp_path: Path) -> list[Tensor]:
    """Three tensors in a mapped file."""
    noise = torch.Generator().manual_seed(0)
    save_file({str(n): torch.randn(64, 64, generator=noise) for n in range(3)}, tmp_path / "weights.safetensors")
    return list(load_file(tmp_path / "weights.safetensors").values())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing passes the ring before it is set."""
    gate, copy = threading.Event(), _Ring.copy

    def waits(self: _Ring, *args: Any) -> None:
        assert gate.wait(SECONDS)
        copy(self, *args)

    monkeypatch.setattr(_Ring, "copy", waits)
    return gate


def begun(copier: Copier, sources: list[Tensor], targets: list[Tensor]) -> list[Copied]:
    ends = [copier.copy([pair], [copier.mark()]) for pair in zip(sources, targets, strict=True)]
    return [end for end in ends if end is not None]


def test_the_host_goes_on_while_a_file_is_read(gpu: Any, sources: list[Tensor], gate: threading.Event) -> None:
    with gpu.watched("random") as seen, host_budget(0):
        host_weights = HostWeights(GPU)
        host_weights.add(sources)
        copier, targets = Copier(host_weights, GPU), [torch.empty(64, 64, device=GPU) for _ in sources]
        ends = begun(copier, sources, targets)
        assert not any(end.done() for end in ends)
        gate.set()
        for end, source, target in zip(ends, sources, targets, strict=True):
            copier.wait(end)
            assert torch.equal((target * 1).cpu(), source)
        host_weights.undo()
        del copier, targets, target
    assert seen.clean, seen


def test_what_is_not_read_yet_is_given_up(gpu: Any, sources: list[Tensor], gate: threading.Event) -> None:
    with gpu.watched("lazy") as seen, host_budget(0):
        host_weights = HostWeights(GPU)
        host_weights.add(sources)
        copier, targets = Copier(host_weights, GPU), [torch.zeros(64, 64, device=GPU) for _ in sources]
        ends = begun(copier, sources, targets)
        while not ends[0].running():
            pass
        ends[2].add_done_callback(lambda _: gate.set())
        copier.drain()
        assert [end.cancelled() for end in ends] == [False, True, True]
        assert torch.equal((targets[0] * 1).cpu(), sources[0])
        assert not targets[1].any() and not targets[2].any()
        host_weights.undo()
        del copier, targets
    assert seen.clean, seen


def test_an_error_of_the_reader_reaches_the_run(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.plain("sd15").unet.save_pretrained(tmp_path)
    left, copy = [20], _Ring.copy

    def fails(self: _Ring, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("the disk is gone")
        copy(self, *args)

    with mapped(tmp_path) as unet, gpu.watched("random") as seen, attached(unet, WAYS["blocks"], device=GPU):
        latents = denoise(unet)
        monkeypatch.setattr(_Ring, "copy", fails)
        with pytest.raises(OSError, match="the disk is gone"):
            denoise(unet)
        assert {tensor.device.type for tensor in unet.parameters()} == {"cpu"}
        assert torch.equal(denoise(unet), latents)
    assert seen.clean, seen
