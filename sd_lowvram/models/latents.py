"""The latents that a target's models work on: their size, their channels, and the type of what is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import BadInputError
from ..weights import loaded_dtype
from .anatomy import Anatomy
from .calls import Shape
from .causal_autoencoder import FRAMES, sees_frames


def scale_factor(anatomy: Anatomy) -> int:
    """Pixels of a picture for one latent pixel, along one side: 8 for Stable Diffusion, 4 for its upscaler."""
    config = anatomy.config(anatomy.autoencoder)
    scale = anatomy.config(anatomy.denoiser).get("latent_scale", config.get("latent_scale"))
    if scale is not None:
        return int(scale)
    if "dim_mult" in config:
        return int(2 ** (len(config["dim_mult"]) - 1)) * _packed_side(config)
    return int(2 ** (len(config.get("block_out_channels", (0,) * 4)) - 1))


def latent_size(anatomy: Anatomy, shape: Shape) -> tuple[int, int]:
    """Height and width of the latents."""
    factor = scale_factor(anatomy)
    return shape.height // factor, shape.width // factor


def own_size(anatomy: Anatomy) -> tuple[int, int]:
    """Width and height in pixels for which the denoiser was made."""
    sample = anatomy.config(anatomy.denoiser).get("sample_size") or 64
    rows, columns = (sample, sample) if isinstance(sample, int) else sample
    return columns * scale_factor(anatomy), rows * scale_factor(anatomy)


def native_size(anatomy: Anatomy) -> int:
    """The picture's side in pixels for which the model was made."""
    if anatomy.denoiser is None:
        return int(anatomy.config(anatomy.autoencoder).get("sample_size") or 512)
    return own_size(anatomy)[1]


def latent_channels(anatomy: Anatomy) -> int:
    """Channels of the latents: those that the autoencoder decodes, or without one those that the denoiser predicts."""
    if anatomy.autoencoder is not None:
        config = anatomy.config(anatomy.autoencoder)
        return int(config.get("latent_channels") or config.get("z_dim") or 4)
    config = anatomy.config(anatomy.denoiser)
    return int(config.get("out_channels") or config.get("in_channels") or 4)


def check_latents(owner: Any, anatomy: Anatomy) -> None:
    """Compare the channels that the denoiser of ``owner`` makes with those that its autoencoder decodes.

    Raises:
        BadInputError: they differ, so that a run would fail after its last step.
    """
    if anatomy.denoiser is None or anatomy.autoencoder is None:
        return
    channels, decoded = anatomy.config(anatomy.denoiser).get("out_channels"), latent_channels(anatomy)
    if channels is not None and int(channels) != decoded:
        raise BadInputError(
            f"the {anatomy.denoiser} of {type(owner).__name__} makes latents of {channels} channels, and its "
            f"{anatomy.autoencoder} decodes {decoded}: it is another model's autoencoder; load the one of this model"
        )


def pixel_channels(anatomy: Anatomy) -> int:
    """Channels of what the autoencoder encodes: 3, or 6 where depth goes with the colours."""
    config = anatomy.config(anatomy.autoencoder)
    return int(config.get("input_channels") or config.get("in_channels", 3)) // _packed_side(config) ** 2


def _packed_side(config: Mapping[str, Any]) -> int:
    """Pixels of the squares that the autoencoders of Wan 2.2 take as channels."""
    return int(config.get("patch_size") or 1) if "dim_mult" in config else 1


def has_frames(anatomy: Anatomy) -> bool:
    """True if the autoencoder takes frames (N, C, frames, H, W), as those of Qwen-Image and Wan; a picture is one."""
    return anatomy.autoencoder is not None and sees_frames(anatomy.vae)


def latent_shape(anatomy: Anatomy, shape: Shape) -> tuple[int, ...]:
    """Shape of the latents that the autoencoder decodes."""
    frames = (shape.frames,) if has_frames(anatomy) else ()
    return (shape.batch, latent_channels(anatomy), *frames, *latent_size(anatomy, shape))


def pixel_shape(anatomy: Anatomy, shape: Shape) -> tuple[int, ...]:
    """Shape of the pixels that the autoencoder encodes."""
    frames = (1 + FRAMES * (shape.frames - 1),) if has_frames(anatomy) else ()
    return (shape.batch, pixel_channels(anatomy), *frames, shape.height, shape.width)


def dtype_of(anatomy: Anatomy, name: str, as_loaded: bool = False) -> torch.dtype:
    """Return the type of a component's inputs: the type in which its host computes, else that of the weights.

    Weights of 8 bits are widened for use, so if a component has other weights, their type counts.

    Args:
        anatomy: of the target.
        name: name of the component.
        as_loaded: True to use the types before our hooks converted them.
    """
    tensors = anatomy.components[name].parameters()
    dtypes = (loaded_dtype(tensor) if as_loaded else tensor.dtype for tensor in tensors)
    wide = (dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1)
    return anatomy.computes.get(name) or next(wide, torch.float32)


def unpack(anatomy: Anatomy, latents: Any) -> Any:
    """Return ``latents`` (N, C, h, w), unpacked if they are packed as FLUX.2 denoises them: 2x2 squares, normalised by
    a batch norm.

    A host's own decode unpacks them, so a host's latents stay as they are.

    Args:
        anatomy: with the autoencoder.
        latents: (N, C, h, w) or (N, 4 C, h / 2, w / 2).
    """
    norm = getattr(anatomy.vae, "bn", None)
    if (
        norm is None
        or anatomy.family.hosted
        or getattr(latents, "ndim", 0) != 4
        or latents.shape[1] != norm.num_features
    ):
        return latents
    mean, variance = (vector.view(1, -1, 1, 1) for vector in (norm.running_mean, norm.running_var))
    spread = torch.sqrt(variance + norm.eps).to(latents)
    return F.pixel_shuffle(latents * spread + mean.to(latents), 2)
