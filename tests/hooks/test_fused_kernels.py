"""Where fused kernels are set, and what is said where they cannot run; what they compute: fused_interpreted.py."""

from __future__ import annotations

from typing import Any

import compvis
import pytest
import tiny
import torch
from test_unet_hooks import plain, run, unet_of
from torch import nn

from sd_lowvram import Settings, attached
from sd_lowvram.errors import NoSiteError

pytestmark = pytest.mark.filterwarnings("ignore:fused_kernels")
FUSED = Settings(fused_kernels=True)


@pytest.mark.parametrize(("name", "sites"), [("sd15", 22 + 16), ("sd21", 22 + 16), ("sdxl", 17 + 70)])
def test_sites_of_a_pipeline(name: str, sites: int) -> None:
    """Residual blocks and GEGLUs of the UNet; of the autoencoder, 14 residual blocks that decode and 10 that encode."""
    pipe = tiny.pipeline(name)
    with attached(pipe, FUSED, device="cpu") as attachment:
        assert attachment.sites == {"fused_kernels": sites + 14 + 10}


@pytest.mark.parametrize(
    ("settings", "sites"),
    [
        (Settings(vae_fused_kernels=True), 14 + 10),
        (Settings(fused_kernels=False, vae_fused_kernels=True), 14 + 10),
        (Settings(fused_kernels=True, vae_fused_kernels=False), 22 + 16),
        (Settings(fused_kernels=True, vae_fused_kernels=True), 22 + 16 + 14 + 10),
    ],
)
def test_denoiser_and_autoencoder_are_decided_apart(settings: Settings, sites: int) -> None:
    pipe = tiny.pipeline("sd15")
    with attached(pipe, settings, device="cpu") as attachment:
        assert attachment.sites == {"fused_kernels": sites}


def test_sites_of_compvis() -> None:
    pytest.importorskip("ldm")
    for model, sites in ((compvis.unet(), 22 + 16), (compvis.vae(), 14 + 10)):
        with attached(model, FUSED, device="cpu") as attachment:
            assert attachment.sites == {"fused_kernels": sites}


def test_on_a_cpu_the_models_own_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    unet = unet_of("sd15")
    with (
        pytest.warns(UserWarning, match=r"fused_kernels: .*Triton.*\."),
        attached(unet, FUSED, device="cpu"),
    ):
        assert torch.equal(run(unet), plain("sd15", (33, 41), 2))


def test_nothing_to_act_on() -> None:
    text: Any = tiny.components("sd15")["text_encoder"]
    assert isinstance(text, nn.Module)
    unet = unet_of("sd15")
    for model, settings, what in (
        (text, FUSED, "the model has no"),
        (unet, Settings(vae_fused_kernels=True), "no autoencoder with residual blocks"),
    ):
        with pytest.raises(NoSiteError, match=f"fused kernels.*{what}"), attached(model, settings, device="cpu"):
            pass
