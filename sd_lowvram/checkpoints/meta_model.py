"""What a model is made of, without its weights: built-in architectures, and checkpoints read by their header alone."""

from __future__ import annotations

import torch

from ..models import anatomy_of_components
from ..models.anatomy import Anatomy
from .architectures import MODELS, build_components
from .inspection import configuration


def meta_anatomy(model: str | None, dtype: torch.dtype, only: tuple[str, ...] = MODELS) -> Anatomy:
    """The anatomy of a model on the meta device: shapes and types, and not a byte of weights.

    Args:
        model: "sd15", "sd21" or "sdxl", a diffusers folder, or a ``.safetensors`` file. None: the demo model.
        dtype: the type in which it would be loaded.
        only: components that are wanted.

    Raises:
        CheckpointError: missing, truncated, of an unknown kind, or a pickle, which has no header to read.
    """
    components = build_components(configuration(model), dtype=dtype, device="meta", only=only)
    return anatomy_of_components("diffusers", components)
