"""Run by tests/kernels/test_triton.py in a process in which Triton interprets kernels: the hooks that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import compvis
import pytest
import tiny
import torch
from torch import Tensor

from sd_lowvram import Settings, attached, trace
from sd_lowvram.kernels.triton import geglu, group_norm

FUSED = Settings(fused_kernels=True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels' functions in the order in which they are called."""
    names: list[str] = []

    def counted(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        names.append(function.__name__)
        return function(*args, **kwargs)

    for module, name in ((group_norm, "group_norm"), (geglu, "geglu")):
        monkeypatch.setattr(module, name, functools.partial(counted, getattr(module, name)))
    return names


def check(model: Any, run: Callable[[], Tensor], settings: Settings = FUSED) -> None:
    with torch.no_grad():
        expected = run()
        with attached(model, settings, device="cpu"):
            assert tiny.relative_error(run(), expected) < 2e-6
        assert torch.equal(run(), expected)


@functools.cache
def pipe() -> Any:
    return tiny.tiniest()


def predicted(unet: Any) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    sample, text = torch.randn(1, 4, 6, 10, generator=noise), torch.randn(1, 5, 8, generator=noise)
    result: Tensor = unet(sample, torch.tensor(500), text, return_dict=False)[0]
    return result


def test_unet(launched: list[str]) -> None:
    unet = pipe().unet
    check(unet, lambda: predicted(unet))
    assert (launched.count("group_norm"), launched.count("geglu")) == (2 * 8, 4)


def test_unet_channels_last(launched: list[str]) -> None:
    unet = pipe().unet
    check(unet, lambda: predicted(unet), Settings(fused_kernels=True, channels_last=True))


def test_autoencoder(launched: list[str]) -> None:
    vae, latents = pipe().vae, torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(2))
    check(vae, lambda: vae.decode(latents).sample)
    assert launched.count("group_norm") == 2 * 6


def test_an_autoencoder_alone(launched: list[str]) -> None:
    """The denoiser keeps torch's operators, and the bits."""
    whole = pipe()
    latents = torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(2))
    alone = Settings(vae_fused_kernels=True)
    with torch.no_grad():
        expected = predicted(whole.unet)
        with attached(whole, alone, device="cpu"):
            assert torch.equal(predicted(whole.unet), expected) and not launched
    check(whole, lambda: whole.vae.decode(latents).sample, alone)
    assert launched == ["group_norm"] * 2 * 6


def test_exact_tiles_keep_torchs_operators(launched: list[str]) -> None:
    vae, latents = pipe().vae, torch.randn(1, 4, 5, 7, generator=torch.Generator().manual_seed(2))
    check(vae, lambda: vae.decode(latents).sample, Settings(fused_kernels=True, vae_tiles="exact"))
    assert not launched


def test_compvis(launched: list[str]) -> None:
    pytest.importorskip("ldm")
    vae = compvis.vae()
    block, x = vae.decoder.up[0].block[0], torch.randn(1, 64, 3, 4, generator=torch.Generator().manual_seed(2))
    check(vae, lambda: block(x, None))
    assert launched == ["group_norm"] * 2


def test_lora_acts_inside(launched: list[str]) -> None:
    from test_unet_hosts import add_lora

    unet = tiny.tiniest().unet
    without = predicted(unet)
    with attached(unet, FUSED, device="cpu"), torch.no_grad():
        add_lora(unet)
        result = predicted(unet)
    with torch.no_grad():
        expected = predicted(unet)
    assert launched and tiny.relative_error(result, expected) < 2e-6 < tiny.relative_error(result, without)


def test_gradients_and_autocast_take_the_models_own_layers(launched: list[str]) -> None:
    unet = pipe().unet
    with attached(unet, FUSED, device="cpu"):
        predicted(unet.requires_grad_(True)).sum().backward()
        unet.requires_grad_(False).zero_grad()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            predicted(unet)
    assert not launched


def test_a_trace_sees_no_intermediates() -> None:
    """Of a block's norms and activations, as tensors that a plain pass holds and this one does not."""
    product = torch.empty(1, 64, 2 * 640)
    assert trace(geglu.reference, product).peak_bytes - trace(geglu.geglu, product).peak_bytes == product.nbytes // 2
    x = torch.empty(1, 64, 16, 16)
    whole = functools.partial(group_norm.reference, groups=8, weight=None, bias=None, eps=1e-5, silu=True)
    assert trace(whole, x).peak_bytes - trace(lambda x: group_norm.group_norm(x, 8), x).peak_bytes > 0.9 * x.nbytes
