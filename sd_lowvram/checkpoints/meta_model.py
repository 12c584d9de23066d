"""What a model is made of, without its weights: built-in architectures, and checkpoints read by their header alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..models import anatomy_of_components
from ..models.anatomy import Anatomy
from .architectures import MODELS, NAMES, architecture, build_components
from .load import DEMO, PICKLES, detect, single_file_config, tensor_reader
from .safetensors_header import read_header


def blueprint(model: str | None, dtype: torch.dtype, only: tuple[str, ...] = MODELS) -> Anatomy:
    """The anatomy of a model on the meta device: shapes and types, and not a byte of weights.

    Args:
        model: "sd15", "sd21" or "sdxl", a diffusers folder, or a ``.safetensors`` file. None: the demo model.
        dtype: the type in which it would be loaded.
        only: components that are wanted.

    Raises:
        CheckpointError: missing, truncated, of an unknown kind, or a pickle, which has no header to read.
    """
    components = build_components(_configuration(model), dtype=dtype, device="meta", only=only)
    return anatomy_of_components("diffusers", components)


def _configuration(model: str | None) -> dict[str, Any]:
    if model in NAMES:
        return architecture(model or "")
    path = Path(model) if model is not None else DEMO
    if path.is_dir():
        return _folder(path)
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(f"{path} is a pickle, which has no header to plan from: give a .safetensors file")
    kind = detect(read_header(path), path, tensor_reader(path))
    return single_file_config(kind, kind.prediction)


def _folder(path: Path) -> dict[str, Any]:
    """The configurations of a diffusers folder's models."""
    found = {}
    for name in MODELS:
        file = path / name / "config.json"
        if file.is_file():
            try:
                found[name] = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise CheckpointError(f"{file} is no JSON: {error}") from None
    if "unet" not in found:
        raise CheckpointError(f"{path} is no diffusers folder: it has no unet/config.json")
    return found
