"""Winograd's convolutions in the autoencoder: where they run, how near they come, and what keeps the model's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import pytest
import tiny
import torch
from test_vae_exact import with_lora
from torch import Tensor

from sd_lowvram import Settings, attached, optimize, restore
from sd_lowvram.errors import NoSiteError
from sd_lowvram.hooks.numbers import winograd
from sd_lowvram.memory import measured_peak
from sd_lowvram.tracing import trace
from sd_lowvram.weights import weight_bytes

WINOGRAD = Settings(winograd=True)


def autoencoder(channels: int = 64) -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(channels,) * 2,
        layers_per_block=1,
    ).eval()


def latents(rows: int = 41, columns: int = 46) -> Tensor:
    return torch.randn(1, 4, rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def convolved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the maps that were convolved by Winograd's ways."""
    seen: list[tuple[int, ...]] = []
    original = winograd.convolve

    def noted(x: Tensor, *args: Any) -> Tensor:
        seen.append((*x.shape,))
        return original(x, *args)

    monkeypatch.setattr(winograd, "convolve", noted)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("others", [{}, {"vae_tiles": "exact", "vae_strip_mib": 2}, {"offload": "layer"}])
def test_the_same_picture(convolved: list[Any], monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]) -> None:
    monkeypatch.setattr(winograd, "_LEAST_TILES", 32)  # strips of a picture as small as this one have no more
    vae = autoencoder()
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    plain = vae.decode(latents()).sample
    moments = vae.encode(plain).latent_dist.parameters
    with attached(vae, Settings(winograd=True, **others), device="cpu") as attachment:
        assert attachment.sites["winograd"] == 21  # but for narrow ends, and what halves the map
        ours = vae.decode(latents()).sample
        assert len(convolved) >= 11
        assert 0 < tiny.relative_error(ours, plain) < 3e-5
        assert 0 < tiny.relative_error(vae.encode(plain).latent_dist.parameters, moments) < 3e-5
    count = len(convolved)
    assert torch.equal(vae.decode(latents()).sample, plain) and len(convolved) == count
    assert all(torch.equal(value, before[name]) for name, value in vae.state_dict().items())


@torch.no_grad()
def test_a_whole_run(convolved: list[Any]) -> None:
    pipe = families.plain("sd15")
    pipe.register_modules(vae=autoencoder())
    pipe.vae_scale_factor = 2
    size = {"size": 88}
    plain = tiny.run(pipe, **size)
    fixed = dataclasses.replace(Settings.policy("diffusers-default"), winograd=True)
    optimize(pipe, vram="4GB", width=88, height=88, device="cpu", settings=fixed)
    ours = tiny.run(pipe, **size)
    assert convolved and tiny.relative_error(ours, plain) < 1e-3
    restore(pipe)
    assert torch.equal(tiny.run(pipe, **size), plain)


@torch.no_grad()
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_a_lora_has_its_whole_effect(convolved: list[Any], loaded: str) -> None:
    expected = with_lora(autoencoder()).decode(latents()).sample
    vae = with_lora(autoencoder()) if loaded == "before" else autoencoder()
    with attached(vae, WINOGRAD, device="cpu"):
        vae = vae if loaded == "before" else with_lora(vae)
        assert tiny.relative_error(vae.decode(latents()).sample, expected) < 3e-5
    assert convolved


@torch.no_grad()
@pytest.mark.parametrize("kind", ["small", "bfloat16", "autocast"])
def test_what_runs_as_the_model_has_it(convolved: list[Any], kind: str) -> None:
    vae, given = autoencoder(), latents(*((19, 19) if kind == "small" else (21, 23)))
    if kind == "bfloat16":
        vae, given = vae.bfloat16(), given.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        plain = vae.decode(given).sample
        with attached(vae, WINOGRAD, device="cpu"):
            ours = vae.decode(given).sample
    if kind == "small":  # 19x19 is too small, and 38x38 no more
        assert {shape[2:] for shape in convolved} <= {(38, 38)}
    else:
        assert not convolved and torch.equal(ours, plain)


def test_gradients_are_kept(convolved: list[Any]) -> None:
    vae = autoencoder()
    given = latents().requires_grad_()
    with attached(vae, WINOGRAD, device="cpu"):
        vae.decode(given).sample.sum().backward()
    assert given.grad is not None and not convolved


def test_no_site() -> None:
    with pytest.raises(NoSiteError, match="64 channels"), attached(autoencoder(32), WINOGRAD, device="cpu"):
        pass
    with pytest.raises(NoSiteError), attached(tiny.components("sd15")["unet"], WINOGRAD):
        pass


@torch.no_grad()
def test_the_trace_agrees_with_the_allocator(convolved: list[Any]) -> None:
    vae, given = autoencoder(), latents(96, 96)
    with attached(vae, WINOGRAD, device="cpu"):
        traced = trace(vae.decode, given).peak_bytes - weight_bytes(vae) - given.nbytes
        convolved.clear()
        measured = measured_peak(lambda: vae.decode(given))
        assert convolved
    assert abs(traced / measured - 1) < 0.02
