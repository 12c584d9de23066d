"""One pass that stands for its equals: traces see the same peaks and count the same work as with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from sd_lowvram import Settings, attached
from sd_lowvram.architectures import build_components
from sd_lowvram.hooks import vae_exact
from sd_lowvram.memory import MemoryTrace, trace
from sd_lowvram.repeats import representatives
from sd_lowvram.shortened import equal_calls_once, equal_modules

FIGURES = (
    "peak_bytes",
    "host_peak_bytes",
    "activation_peak_bytes",
    "largest_bytes",
    "flops",
    "moved_bytes",
    "copied_bytes",
    "operators",
)


def figures(traced: MemoryTrace) -> dict[str, int]:
    return {name: getattr(traced, name) for name in FIGURES}


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("a", [(0, 1)]),
        ("aa", [(0, 1), (1, 1)]),
        ("aaaaa", [(0, 1), (1, 3), (4, 1)]),
        ("abbaba", [(0, 1), (1, 3), (3, 1), (5, 1)]),
    ],
)
def test_representatives(kinds: str, chosen: list[tuple[int, int]]) -> None:
    assert representatives(kinds) == chosen
    assert sum(passes for _, passes in chosen) == len(kinds)


@pytest.mark.parametrize(
    ("part", "where"), [("decode", "held"), ("decode", "parked"), ("decode", "recomputed"), ("encode", "parked")]
)
def test_strips_of_the_autoencoder(part: str, where: str, monkeypatch: Any) -> None:
    vae = build_components(tiny.config("sd15"), only=("vae",), device="meta")["vae"]
    settings = Settings(vae_tiles="exact", vae_map=where, vae_strip_mib=1)

    def once() -> MemoryTrace:
        with torch.inference_mode(), attached(vae, settings, device="cpu"):
            if part == "decode":
                return trace(lambda vae, x: vae.decode(x).sample, vae, torch.empty(1, 4, 45, 48, device="meta"))
            return trace(lambda vae, x: vae.encode(x), vae, torch.empty(1, 3, 360, 384, device="meta"))

    short = once()
    monkeypatch.setattr(vae_exact, "representatives", lambda kinds: [(number, 1) for number in range(len(kinds))])
    whole = once()
    assert len(short.timeline) < 0.7 * len(whole.timeline)
    assert figures(short) == figures(whole)


@pytest.mark.parametrize("settings", [Settings(), Settings(transformer_chunks=4, guidance_in_turn=True)])
def test_equal_blocks(settings: Settings) -> None:
    config = tiny.config("sdxl")
    config["unet"]["transformer_layers_per_block"] = [1, 2, 5]
    unet = build_components(config, only=("unet",), device="meta")["unet"]
    extra = {"text_embeds": torch.empty(2, 32, device="meta"), "time_ids": torch.empty(2, 6, device="meta")}
    given = torch.empty(2, 4, 64, 64, device="meta"), torch.tensor(1), torch.empty(2, 77, 64, device="meta")

    def once() -> MemoryTrace:
        return trace(unet, *given, added_cond_kwargs=extra, return_dict=False)

    with torch.inference_mode(), attached(unet, settings, device="cpu"):
        whole = once()
        with equal_calls_once(equal_modules(unet)):
            short = once()
    assert len(short.timeline) < 0.9 * len(whole.timeline)
    assert figures(short) == figures(whole)
