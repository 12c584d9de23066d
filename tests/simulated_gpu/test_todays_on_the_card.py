"""Transformers of today, all weights copied layer by layer: the same bits however late copies run, and no race."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import todays
import torch
from on_card import GPU
from test_planted_faults import FAULTS, exchanged, seen_of
from torch import Tensor

from sd_lowvram import Settings, attached
from sd_lowvram.hooks.parking import offload
from sd_lowvram.hooks.pieces import joint_chunks
from sd_lowvram.weights import weight_bytes

LEAST = Settings(offload="layer")
"""Of what keeps all bits: a layer's weights on the card and memory to fetch the next."""

FAMILIES = {
    "flux": todays.flux, "klein": todays.klein, "sd3": todays.sd3, "z_image": todays.z_image, "chroma": todays.chroma,
    "qwen_image": todays.qwen_image,
}  # fmt: skip


def made(pipe: Any, settings: Settings) -> Tensor:
    """Latents of three steps, in host memory, as is all that the scheduler keeps."""
    with attached(pipe, settings, device=GPU):
        latents = todays.picture(pipe, steps=3, output_type="latent").cpu()
    pipe.scheduler.set_timesteps(3)
    return latents


@pytest.mark.parametrize(
    ("family", "schedule"), [(name, ["lazy", "random"][number % 2]) for number, name in enumerate(FAMILIES)]
)
def test_streamed(gpu: Any, family: str, schedule: str) -> None:
    pipe = FAMILIES[family]()
    wanted = made(pipe, Settings(offload="none"))
    with gpu.watched(schedule) as seen:
        latents = made(pipe, LEAST)
    assert torch.equal(latents, wanted)
    assert seen.clean, seen


@pytest.mark.slow(6)
@pytest.mark.parametrize("pieces", [{"transformer_chunks": 3}, {"guidance_in_turn": True}], ids=["chunks", "halves"])
def test_blocks_that_come_whole_as_pieces_use_their_layers_in_turn(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, pieces: dict[str, Any]
) -> None:
    monkeypatch.setattr(joint_chunks, "FEWEST_TOKENS", 4)
    monkeypatch.setattr(offload, "MIB", 1 << 10)
    pipe = todays.sd3()
    block = weight_bytes(pipe.transformer.transformer_blocks[0]) >> 10
    resident = Settings(**pieces, offload="none")
    wanted = made(pipe, resident)
    with gpu.watched("random") as seen:
        latents = made(pipe, dataclasses.replace(resident, offload="blocks", weights_mib=block * 5 // 2))
    assert torch.equal(latents, wanted)
    assert seen.clean, seen


def test_a_step_that_is_made_again_since_fp16_overflowed(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "")  # nothing is remembered from run to run
    pipe = todays.z_image()
    with torch.no_grad():
        pipe.transformer.layers[1].feed_forward.w2.weight *= 1e6
    half = Settings(precision="fp16-products", offload="none")
    wanted = made(pipe.to(torch.bfloat16), half)
    with gpu.watched("random") as seen:
        latents = made(pipe, dataclasses.replace(half, offload="layer"))
    assert torch.equal(latents, wanted) and wanted.isfinite().all()
    assert seen.clean, seen


@pytest.mark.parametrize("fault", ["the compute does not wait for copies", "copies do not wait for the compute"])
def test_a_planted_fault_is_found(gpu: Any, fault: str, tmp_path: Path) -> None:
    owner, name, make, *_ = FAULTS[fault]
    with exchanged(owner, name, make):
        seen, _ = seen_of(gpu, "eager", lambda pipe, folder: made(pipe, LEAST) is not None, todays.flux(), tmp_path)
    assert seen.races
