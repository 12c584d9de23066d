"""What the UNet hooks leave of the activations, traced on the full-size SD1.5 UNet in fp16."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import families
import pytest
import torch
from test_unet_hooks import ALONE, inputs
from unet_bounds import BOUNDS, SMALLEST

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.memory import repeats
from sd_lowvram.tracing import MemoryTrace, trace
from sd_lowvram.units import MIB


@functools.lru_cache
def unet() -> Any:
    return build_components("sd15", dtype=torch.float16, device="meta", only=("unet",))["unet"]


@functools.lru_cache
def traced(settings: Settings, size: int, batch: int) -> MemoryTrace:
    latents = torch.empty(batch, 4, size // 8, size // 8, dtype=torch.float16, device="meta")
    text = torch.empty(batch, 77, 768, dtype=torch.float16, device="meta")
    with torch.inference_mode(), attached(unet(), settings, device="cpu"):
        return trace(unet(), latents, torch.tensor(1), text, return_dict=False)


@pytest.mark.parametrize(("size", "batch"), [(512, 1), (512, 2), (2048, 2), (4096, 2)])
def test_bounds(size: int, batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """With guidance the peak is that of a single picture, so one bound does for both."""
    smallest, plain = traced(SMALLEST, size, batch), traced(Settings(), size, batch)
    with capsys.disabled():
        print(
            f"\n{size}x{size}, batch {batch}: {smallest.activation_peak_bytes / MIB:.1f} MiB on the device and "
            f"{smallest.host_peak_bytes / MIB:.1f} in host memory, plain {plain.activation_peak_bytes / MIB:.1f}"
        )
    assert smallest.activation_peak_bytes <= BOUNDS[size]


@pytest.mark.parametrize("hook", ["feed_forward", "guidance_in_turn", "park_skips"])
def test_alone_it_saves(hook: str) -> None:
    """The other knobs act on what is no longer the largest once these have acted."""
    assert (
        traced(Settings(**ALONE[hook]), 512, 2).activation_peak_bytes < traced(Settings(), 512, 2).activation_peak_bytes
    )


@pytest.mark.parametrize("knob", ["residual_strips", "transformer_chunks", "guidance_in_turn", "park_skips"])
def test_without_it_the_smallest_is_larger(knob: str) -> None:
    without = dataclasses.replace(SMALLEST, **{knob: None})
    assert traced(without, 512, 2).activation_peak_bytes > 1.05 * traced(SMALLEST, 512, 2).activation_peak_bytes


def test_an_inner_piece_stands_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.parts("sd15")["unet"]
    given = inputs(model, (72, 64), 2)
    settings = Settings(residual_strips=5, transformer_chunks=4, feed_forward_chunks=4, guidance_in_turn=True)
    traces = []
    for _ in range(2):
        with attached(model, settings, device="cpu"), torch.inference_mode():
            traces.append(trace(model, **given))
        monkeypatch.setattr(repeats, "FakeTensor", type(None))
    short, whole = traces
    assert len(short.timeline) < 0.85 * len(whole.timeline)
    assert short.activation_peak_bytes == whole.activation_peak_bytes
    assert short.host_peak_bytes == whole.host_peak_bytes
