"""Exact tiles on autoencoders that somebody has changed: with a LoRA, other layers, gradients, overflow."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from sd_lowvram import Settings, attached
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.errors import NoSiteError

EXACT = Settings(vae_tiles="exact", vae_map="held", vae_strip_mib=1)


def autoencoder() -> Any:
    return build_components(tiny.config("sd15"), only=("vae",))["vae"]


def latents() -> Tensor:
    return torch.randn(1, 4, 9, 11, generator=torch.Generator().manual_seed(0))


def with_lora(vae: Any) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    layers = ["conv_in", "conv_out", "conv1", "conv2", "conv", "conv_shortcut", "to_q", "to_k", "to_v", "to_out.0"]
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=layers, init_lora_weights=False), vae)


@torch.no_grad()
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_lora_has_its_whole_effect(loaded: str) -> None:
    plain = autoencoder().decode(latents()).sample
    expected = with_lora(autoencoder())
    pixels = expected.decode(latents()).sample
    moments = expected.encode(pixels.clamp(-1, 1)).latent_dist.parameters
    vae = with_lora(autoencoder()) if loaded == "before" else autoencoder()
    with attached(vae, EXACT):
        vae = vae if loaded == "before" else with_lora(vae)
        result = vae.decode(latents()).sample
        assert tiny.relative_error(result, pixels) < 1e-5
        assert tiny.relative_error(vae.encode(pixels.clamp(-1, 1)).latent_dist.parameters, moments) < 1e-5
    assert tiny.relative_error(pixels, plain) > 1e-2


def test_another_activation_is_refused() -> None:
    vae = autoencoder()
    vae.decoder.up_blocks[0].resnets[0].nonlinearity = nn.GELU()
    with pytest.raises(NoSiteError), attached(vae, EXACT):
        pass


def test_gradients_flow_as_without_it() -> None:
    expected, given = latents().requires_grad_(), latents().requires_grad_()
    vae = autoencoder()
    vae.decode(expected).sample.sum().backward()
    with attached(vae, EXACT):
        vae.decode(given).sample.sum().backward()
    assert expected.grad is not None and given.grad is not None
    assert torch.equal(given.grad, expected.grad)


@torch.no_grad()
def test_tiling_that_is_asked_for_later_is_not_laid_on_top() -> None:
    vae = autoencoder()
    vae.tile_latent_min_size = 4
    plain = vae.decode(latents()).sample
    with attached(vae, EXACT), pytest.warns(UserWarning, match="ignored"):
        vae.enable_tiling()
        assert tiny.relative_error(vae.decode(latents()).sample, plain) < 1e-5
    vae.enable_tiling()
    assert vae.use_tiling


@torch.no_grad()
@pytest.mark.parametrize("overflows", [False, True])
def test_overflow_in_float16_is_told(overflows: bool) -> None:
    vae = autoencoder().half()
    if overflows:
        vae.decoder.conv_in.weight.mul_(1e4)
        vae.decoder.conv_in.bias.fill_(6e4)
    with attached(vae, EXACT), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vae.decode(latents().half())
    assert any("overflowed" in str(warning.message) for warning in caught) == overflows
