"""Where no budget is stated, a plan has what the whole card is there for, its context counted once."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from on_card import GPU

import sd_lowvram
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices import info
from sd_lowvram.devices.calibration import measured_overhead
from sd_lowvram.devices.overhead import Overhead
from sd_lowvram.devices.performance import profile
from sd_lowvram.planning import request

MIB = 1 << 20


@pytest.fixture
def unet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Of full size, without weights; rates are those of a card that nobody measures, and no context is known that was
    measured on a card of other tests."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))
    return build_components("sd15", torch.float16, "meta", only=("unet",))["unet"]


def others(card: Any) -> int:
    """What tests before this one left on the card, which is no context; the next tensor can have what is free in it."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(card.used) - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()


@pytest.mark.parametrize("card_mib", [1100, 2650, 4096])
@pytest.mark.parametrize("context_mib", [450, 300])
def test_an_empty_budget_chooses_what_the_cards_size_chooses(
    gpu: Any, unet: Any, card_mib: int, context_mib: int
) -> None:
    size = card_mib * MIB
    with gpu.card.of_size(size + others(gpu.card), context_mib * MIB):
        empty = sd_lowvram.plan(unet, ram="16GB", device=GPU)
        stated = sd_lowvram.plan(unet, vram=f"{size} b", ram="16GB", device=GPU)
    assert empty.request.vram == stated.request.vram
    # A stated budget is filled with streamed weights.
    assert dataclasses.replace(empty.settings, weights_mib=stated.settings.weights_mib) == stated.settings
    assert (empty.settings.weights_mib or 0) <= (stated.settings.weights_mib or 0)
    assert empty.predicted.seconds >= stated.predicted.seconds


@pytest.mark.parametrize("context_mib", [450, 300])
def test_what_others_hold_is_in_no_budget(
    gpu: Any, unet: Any, context_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reports what of the card is this process' own."""
    taken = 1000 * MIB
    monkeypatch.setattr(info, "process_memory", lambda device: context_mib * MIB + torch.cuda.memory_reserved(device))
    with gpu.card.of_size(4096 * MIB + others(gpu.card), context_mib * MIB + taken):
        empty = sd_lowvram.plan(unet, ram="16GB", device=GPU)
    assert empty.request.vram == 4096 * MIB - taken


@pytest.mark.parametrize("told", [True, False])
def test_what_other_programs_hold_is_not_measured_as_context(
    gpu: Any, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels, "computes", False)
    if told:
        monkeypatch.setattr(info, "process_memory", lambda device: 310 * MIB + torch.cuda.memory_reserved(device))
    others(gpu.card)
    with gpu.card.of_size(4096 * MIB, 1500 * MIB):
        measured = measured_overhead(GPU).context_bytes
        torch.cuda.empty_cache()
    assert measured == (310 * MIB if told else Overhead().context_bytes)
    with gpu.card.of_size(4096 * MIB, 310 * MIB):
        assert measured_overhead(GPU).context_bytes == 310 * MIB
        torch.cuda.empty_cache()
