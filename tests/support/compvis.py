"""Small models of CompVis' real classes, with the topology of SD1.5 and SD2.x; random weights in float32."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

KINDS: dict[str, dict[str, Any]] = {
    "sd15": {"num_heads": 4},
    "sd21": {"num_head_channels": 16, "use_linear_in_transformer": True},
}
_TOPOLOGY: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "num_res_blocks": 2,
    "attention_resolutions": [4, 2, 1],
    "use_spatial_transformer": True,
    "transformer_depth": 1,
    "use_checkpoint": False,
    "legacy": False,
}
SHALLOW: dict[str, Any] = {"num_res_blocks": 1, "channel_mult": (1, 2), "attention_resolutions": [1]}
DECODER: dict[str, Any] = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 64,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 32,
    "ch_mult": [1, 2, 2, 2],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "dropout": 0.0,
}


def unet(kind: str = "sd15", **changed: Any) -> Any:
    """A narrow UNetModel, its arguments ``changed``."""
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    narrow = {"model_channels": 32, "channel_mult": (1, 2, 2, 2), "context_dim": 32, **KINDS[kind]}
    return with_random_weights(UNetModel(**{**_TOPOLOGY, **narrow, **changed}))


def full_unet() -> Any:
    """SD1.5's UNetModel in fp16, on the meta device."""
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    wide = {"model_channels": 320, "channel_mult": (1, 2, 4, 4), "context_dim": 768, "num_heads": 8}
    with torch.device("meta"):
        return UNetModel(**_TOPOLOGY, **wide).half().eval().requires_grad_(False)


@contextlib.contextmanager
def lightning_at_hand() -> Iterator[None]:
    """Within the block lightning can be imported: itself, or its one class that autoencoders use nothing of."""
    with contextlib.suppress(ImportError):
        importlib.import_module("pytorch_lightning")
    lightning = types.ModuleType("pytorch_lightning")
    lightning.LightningModule = nn.Module  # type: ignore[attr-defined]
    stands_in = sys.modules.setdefault("pytorch_lightning", lightning) is lightning
    try:
        yield
    finally:
        if stands_in:
            del sys.modules["pytorch_lightning"]


def vae(**changed: Any) -> Any:
    """A narrow AutoencoderKL, its decoder's arguments ``changed``."""
    with lightning_at_hand():
        from ldm.models.autoencoder import AutoencoderKL
    return with_random_weights(AutoencoderKL({**DECODER, **changed}, {"target": "torch.nn.Identity"}, 4))


class LatentDiffusion(nn.Module):
    """A shell as CompVis' and sgm's, which keep their models like this.

    Args:
        shallow: a UNet of two levels with a block each, which has the same calls as that of four with two.
    """

    def __init__(self, shallow: bool = True) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.diffusion_model = unet(**SHALLOW) if shallow else unet()
        self.first_stage_model = vae(num_res_blocks=1) if shallow else vae()


def with_random_weights(module: Any) -> Any:
    """The module with weights that let every layer count; some are zero from the start."""
    noise = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.05, generator=noise)
        else:
            parameter.data.uniform_(0.5, 1.0, generator=noise)
    return module.eval().requires_grad_(False)


def inputs(width: int, size: tuple[int, int] = (24, 32), batch: int = 2) -> tuple[torch.Tensor, ...]:
    """Latents, timesteps and text; size in latent pixels (height, width)."""
    noise = torch.Generator().manual_seed(1)
    latents, text = (torch.randn(batch, *shape, generator=noise) for shape in ((4, *size), (77, width)))
    return latents, torch.full((batch,), 500), text
