"""Autoencoders of other models run by exact tiles as Stable Diffusion's do; those built otherwise are planned plain."""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import pytest
import tiny
import torch
from torch import Tensor

import sd_lowvram
from sd_lowvram import Settings, attached, decode, encode
from sd_lowvram.checkpoints.architectures import autoencoder, build_components
from sd_lowvram.errors import BudgetError, NoSiteError
from sd_lowvram.session import attachments
from sd_lowvram.units import MIB

NAMES = ("flux", "flux2")
CHANNELS = {"flux": 16, "flux2": 32}
MAPS = ("held", "parked", "recomputed")


@functools.lru_cache
def small(name: str) -> Any:
    narrow = {"block_out_channels": [16, 32, 32, 32], "norm_num_groups": 8}
    return build_components({"vae": autoencoder(name) | narrow}, only=("vae",))["vae"]


def full_size(name: str) -> Any:
    return build_components({"vae": autoencoder(name)}, torch.bfloat16, "meta", only=("vae",))["vae"]


@functools.lru_cache
def plain(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Latents of no round size, and their plain decode with its moments."""
    latents = torch.randn(1, CHANNELS[name], 13, 15, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels = small(name).decode(latents).sample
        return latents, pixels, small(name).encode(pixels).latent_dist.parameters


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("name", NAMES)
def test_exact_tiles_are_the_plain_decode_and_encode(name: str, kind: str) -> None:
    latents, pixels, moments = plain(name)
    chosen = Settings(vae_tiles="exact", vae_map=kind, vae_strip_mib=1)
    assert tiny.relative_error(decode(small(name), latents, settings=chosen), pixels) < 1e-5
    assert tiny.relative_error(encode(small(name), pixels, settings=chosen), moments) < 1e-5
    assert moments.shape[1] == 2 * CHANNELS[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_below_the_plain_decode(name: str) -> None:
    latents, pixels, moments = plain(name)
    vae, size = small(name), {"width": 15 * 8, "height": 13 * 8, "device": "cpu", "ram": "1GB"}
    plenty = sd_lowvram.plan(vae, vram="1GB", **size)
    least = plenty.minimum_vram_bytes
    assert least < plenty.predicted.peak_bytes
    plan = sd_lowvram.optimize(vae, vram=f"{least} B", **size)
    try:
        assert plan.settings.vae_tiles == "exact" and plan.predicted.peak_bytes <= least
        with torch.no_grad():
            assert tiny.relative_error(vae.decode(latents).sample, pixels) < 1e-5
    finally:
        sd_lowvram.restore(vae)
    assert not attachments(vae) and torch.equal(vae.decode(latents).sample, pixels)
    assert tiny.relative_error(decode(vae, latents, vram=f"{least} B", ram="1GB"), pixels) < 1e-5
    assert tiny.relative_error(encode(vae, pixels, vram=f"{2 * least} B", ram="1GB"), moments) < 1e-5
    with pytest.raises(BudgetError, match="decode"):
        decode(vae, latents, vram=f"{least // 2} B", ram="1GB")


@pytest.mark.parametrize("name", NAMES)
def test_full_size_at_1024(name: str) -> None:
    vae = full_size(name)
    found = {}
    for way in (Settings(vae_tiles="off"), *(Settings(vae_tiles="exact", vae_map=kind) for kind in MAPS)):
        plan = sd_lowvram.plan(vae, vram="16GB", ram="16GB", width=1024, height=1024, device="cpu", settings=way)
        (stage,) = plan.stages
        found[way.vae_map] = stage.activation_bytes
    assert found[None] > 1500 * MIB
    assert found["held"] <= 0.55 * found[None]
    # 16-bit convolutions are unfolded on a processor without instructions for them
    assert found["parked"] <= 0.15 * found[None]
    assert found["recomputed"] <= 0.6 * found["held"]


@torch.no_grad()
def test_what_the_denoiser_of_flux2_makes_is_unpacked_as_its_pipeline_does_it() -> None:
    vae = small("flux2")
    torch.manual_seed(0)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2)
    packed = torch.randn(2, 128, 5, 6)
    pipe = diffusers.Flux2KleinPipeline
    spread = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    latents = pipe._unpatchify_latents(packed * spread + vae.bn.running_mean.view(1, -1, 1, 1))
    exact = Settings(vae_tiles="exact")
    assert torch.equal(decode(vae, packed, settings=exact), decode(vae, latents, settings=exact))
    assert tiny.relative_error(decode(vae, packed, settings=exact), vae.decode(latents).sample) < 1e-5


def test_the_native_size_is_the_autoencoders_own() -> None:
    plan = sd_lowvram.plan(full_size("flux"), vram="16GB", ram="16GB", device="cpu")
    assert (plan.request.width, plan.request.height) == (1024, 1024)


@functools.lru_cache
def taesd() -> Any:
    torch.manual_seed(0)
    narrow = {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4}
    return diffusers.AutoencoderTiny(**narrow, latent_channels=16).eval().requires_grad_(False)


def test_taesd_is_planned_plain() -> None:
    vae, latents = taesd(), torch.randn(2, 16, 19, 23, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels = vae.decode(latents).sample
        encoded = vae.encode(pixels).latents
    size = {"width": 23 * 8, "height": 19 * 8, "batch": 2, "device": "cpu", "ram": "1GB"}
    plan = sd_lowvram.optimize(vae, vram="1GB", **size)
    try:
        assert plan.settings.vae_tiles == "off" and [stage.name for stage in plan.stages] == ["decode"]
        assert tiny.relative_error(vae.decode(latents).sample, pixels) < 1e-5
    finally:
        sd_lowvram.restore(vae)
    assert tiny.relative_error(decode(vae, latents, vram="1GB"), pixels) < 1e-5
    assert tiny.relative_error(encode(vae, pixels, vram="1GB"), encoded) < 1e-5
    assert tiny.relative_error(decode(vae, latents, settings=Settings.smallest()), pixels) < 1e-5


def test_exact_tiles_of_taesd_are_refused_by_name() -> None:
    chosen = Settings(vae_tiles="exact")
    with pytest.raises(NoSiteError, match=r"AutoencoderTiny.*vae_tiles"):
        sd_lowvram.plan(taesd(), vram="1GB", width=64, height=64, settings=chosen)
    with pytest.raises(NoSiteError, match="AutoencoderTiny"), attached(taesd(), chosen):
        pass


def test_attention_between_the_levels_is_not_left_out() -> None:
    kinds = {"down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D")}
    kinds |= {"up_block_types": ("AttnUpDecoderBlock2D", "UpDecoderBlock2D")}
    torch.manual_seed(0)
    vae: Any = diffusers.AutoencoderKL(**kinds, block_out_channels=(32, 32)).eval().requires_grad_(False)
    latents = torch.randn(1, 4, 16, 16)
    pixels = vae.decode(latents).sample
    assert tiny.relative_error(decode(vae, latents, vram="1GB"), pixels) < 1e-5
    with pytest.raises(NoSiteError, match="exact tiles"):
        decode(vae, latents, settings=Settings(vae_tiles="exact"))
