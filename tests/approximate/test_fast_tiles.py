"""Tiles that are decoded apart and blended: shares sum to one, small pictures are left alone, others differ."""

from __future__ import annotations

import functools
from typing import Any

import compvis
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_lowvram import Settings, attached, plan
from sd_lowvram.approximate.vae_fast import blend, shares, starts
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.errors import NoSiteError


@functools.lru_cache
def small() -> Any:
    return build_components(tiny.config("sd15"), only=("vae",))["vae"]


@given(size=st.integers(1, 120), tile=st.integers(2, 40), shared=st.integers(1, 39))
def test_shares_of_fast_tiles_sum_to_one(size: int, tile: int, shared: int) -> None:
    places = starts(size, tile, min(shared, tile - 1))
    long = min(tile, size)
    sums = torch.zeros(size, dtype=torch.float64)
    for place, part in zip(places, shares(places, long, size), strict=True):
        assert (part >= 0).all()
        sums[place : place + long] += part
    assert torch.allclose(sums, torch.ones_like(sums))


@given(height=st.integers(1, 40), width=st.integers(1, 40), up=st.sampled_from([1, 2, 8]))
@settings(deadline=None)
def test_blending_an_exact_tile_changes_nothing(height: int, width: int, up: int) -> None:
    x = torch.rand(1, 2, height, width)
    result = blend(lambda tile: tile.repeat_interleave(up, 2).repeat_interleave(up, 3), x, 12, 4, up)
    assert torch.allclose(result, x.repeat_interleave(up, 2).repeat_interleave(up, 3), atol=1e-6)


def test_fast_tiles_leave_small_pictures_alone() -> None:
    latents = torch.randn(1, 4, 64, 40)
    with torch.no_grad():
        plain = small().decode(latents).sample
        with attached(small(), Settings(vae_tiles="fast")):
            assert torch.equal(small().decode(latents).sample, plain)
            larger = torch.randn(1, 4, 65, 40)
            tiled = small().decode(larger).sample
        assert not torch.equal(tiled, small().decode(larger).sample)


def both(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        pixels = vae.decode(torch.randn(2, 4, 19, 13, generator=noise))
        return pixels, vae.encode(torch.randn(2, 3, 152, 104, generator=noise)).parameters


def test_an_autoencoder_of_compvis_in_fast_tiles_draws_another_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = compvis.vae()
    plain = both(vae)
    monkeypatch.setattr("sd_lowvram.approximate.vae_fast.TILE", 16)
    monkeypatch.setattr("sd_lowvram.approximate.vae_fast.OVERLAP", 4)
    with attached(vae, Settings(vae_tiles="fast"), device="cpu"):
        result = both(vae)
    for ours, expected in zip(result, plain, strict=True):
        assert ours.shape == expected.shape and 1e-4 < tiny.relative_error(ours, expected) < 0.5


def test_fast_tiles_of_what_they_cannot_divide_are_refused() -> None:
    import diffusers

    frames = diffusers.AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    with pytest.raises(NoSiteError, match="AutoencoderKLQwenImage"):
        plan(frames, vram="1GB", width=64, height=64, settings=Settings(vae_tiles="fast"))
    with pytest.raises(NoSiteError), attached(tiny.tiniest().unet, Settings(vae_tiles="fast")):
        pass
