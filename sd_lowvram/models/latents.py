"""The latents that a target's models work on: their size, their channels, and the type of what is computed."""

from __future__ import annotations

import torch

from ..weights import loaded_dtype
from .anatomy import Anatomy
from .calls import Shape


def scale_factor(anatomy: Anatomy) -> int:
    """Pixels that a latent pixel stands for in one direction: 8 for Stable Diffusion, 4 for its upscaler."""
    return int(2 ** (len(anatomy.config(anatomy.autoencoder).get("block_out_channels", (0,) * 4)) - 1))


def latent_size(anatomy: Anatomy, shape: Shape) -> tuple[int, int]:
    """Height and width of the latents."""
    factor = scale_factor(anatomy)
    return shape.height // factor, shape.width // factor


def native_size(anatomy: Anatomy) -> int:
    """The picture's side in pixels for which the model was made."""
    if anatomy.denoiser is None:
        return int(anatomy.config(anatomy.autoencoder).get("sample_size") or 512)
    sample = anatomy.config(anatomy.denoiser).get("sample_size") or 64
    return int(sample if isinstance(sample, int) else sample[0]) * scale_factor(anatomy)


def latent_channels(anatomy: Anatomy) -> int:
    """Channels of the latents: those that the autoencoder decodes, and without one those that the denoiser predicts."""
    if anatomy.autoencoder is not None:
        return int(anatomy.config(anatomy.autoencoder).get("latent_channels", 4))
    return int(anatomy.config(anatomy.denoiser).get("out_channels", 4))


def pixel_channels(anatomy: Anatomy) -> int:
    """Channels of what the autoencoder encodes: 3, or 6 where depth goes with the colours."""
    return int(anatomy.config(anatomy.autoencoder).get("in_channels", 3))


def dtype_of(anatomy: Anatomy, name: str, as_loaded: bool = False) -> torch.dtype:
    """The type of what a component is called with: what its host computes in, else its weights' own.

    Weights of 8 bits are widened by whoever uses them, so of a component that has others these tell.

    Args:
        as_loaded: whatever our hooks have converted the weights to since.
    """
    tensors = anatomy.components[name].parameters()
    dtypes = (loaded_dtype(tensor) if as_loaded else tensor.dtype for tensor in tensors)
    wide = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return anatomy.computes.get(name) or next(wide, torch.float32)
