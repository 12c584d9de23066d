"""What a model is made of, without its weights: built-in architectures, and checkpoints read by their header alone."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import CheckpointError
from ..models import anatomy_of_components
from ..models.anatomy import Anatomy
from .architectures import MODELS, build_components
from .inspection import configuration


def meta_anatomy(model: str | None, dtype: torch.dtype, only: tuple[str, ...] = MODELS) -> Anatomy:
    """The anatomy of a model on the meta device, with the parts of :func:`meta_components`.

    Raises:
        CheckpointError: as that does.
    """
    return anatomy_of_components("diffusers", meta_components(model, dtype, only))


def meta_components(model: str | None, dtype: torch.dtype, only: tuple[str, ...] = MODELS) -> dict[str, nn.Module]:
    """The models that a model is made of, by name, on the meta device: shapes and types, and not a byte of weights.

    Args:
        model: "sd15", "sd21" or "sdxl", a diffusers folder, or a ``.safetensors`` file. None: the demo model.
        dtype: the type in which it would be loaded.
        only: components that are wanted.

    Raises:
        CheckpointError: missing, truncated, of an unknown kind, or a pickle, which has no header to read; or its
            configuration makes no sense.
    """
    config = configuration(model)
    try:
        return build_components(config, dtype=dtype, device="meta", only=only)
    except Exception as error:  # whatever a configuration that makes no sense provokes in the library
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{model} cannot be built by its configuration: {type(error).__name__}: {reason}"
        ) from error
