"""UNets that take turns on a card: one of them is there at a time, no bit changes, nothing stays."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny
import torch
from on_card import GPU

from sd_lowvram import Settings
from sd_lowvram.devices import this_machine
from sd_lowvram.devices.performance import PROFILES
from sd_lowvram.unets.prune import cut_by_names, prune_unet
from sd_lowvram.unets.schedule import scheduled
from sd_lowvram.weights import all_tensors


def bytes_of(module: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in all_tensors(module))


def on_card(module: Any) -> bool:
    return any(tensor.device.type == "cuda" for tensor in all_tensors(module))


@pytest.mark.parametrize("offload", ["none", "component", "layer", "blocks"])
def test_one_unet_is_there_at_a_time(gpu: Any, offload: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(this_machine, "calibrate", lambda device: PROFILES["rtx2070"])  # no card's times
    pipe = families.plain("sd15")
    small, own = prune_unet(pipe.unet, cut_by_names(pipe.unet.config, drop=["mid"])), pipe.unet
    settings = Settings(offload=offload, weights_mib=1 if offload == "blocks" else None)
    turns, there = [(small, 1), (own, 3)], []

    def look(pipe: Any, step: int, t: Any, values: dict[str, Any]) -> dict[str, Any]:
        there.append((pipe.unet is own, on_card(small), on_card(own)))
        return values

    with gpu.watched("random") as seen:
        with scheduled(pipe, turns, settings=Settings(offload="none"), device=GPU, vram="8GB"):
            expected = tiny.run(pipe, steps=4).cpu()
        with scheduled(pipe, [(own, 3)], settings=settings, device=GPU, vram="8GB") as alone:
            torch.cuda.reset_peak_memory_stats()
            tiny.run(pipe, steps=3)
            peak_alone = torch.cuda.max_memory_allocated()
        with scheduled(pipe, turns, settings=settings, device=GPU, vram="8GB") as plan:
            torch.cuda.reset_peak_memory_stats()
            found = tiny.run(pipe, steps=4, callback_on_step_end=look).cpu()
            peak = torch.cuda.max_memory_allocated()
        pipe.scheduler.set_timesteps(3)
    assert torch.equal(found, expected)
    assert [own_turn for own_turn, _, _ in there] == [True] * 4
    assert not any(small_there for _, small_there, _ in there)
    assert plan.predicted.peak_bytes == alone.predicted.peak_bytes
    assert peak <= peak_alone + bytes_of(small) // 8  # the larger one's, not both
    assert plan.predicted.host_bytes >= bytes_of(small)
    assert seen.clean, seen
    assert pipe.unet is own and not on_card(own) and not on_card(small)
