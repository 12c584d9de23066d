"""Loads the UNet of a single file from which layers were cut: diffusers reads only files with as many in each block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.architectures import build_components
from ...checkpoints.safetensors_header import read_header
from ...checkpoints.single_file_names import unet_names
from ...errors import CheckpointError


def load_cut_unet(path: Path, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The UNet of ``config`` with its weights in the file at ``path``, on the CPU.

    Raises:
        CheckpointError: the file is not .safetensors, or a weight is missing or has another shape.
    """
    from safetensors import safe_open

    if path.suffix.lower() != ".safetensors":
        raise CheckpointError(
            f"{path} is a pickle of a model that layers were cut out of: these load from .safetensors files"
        )
    unet: Any = build_components({"unet": dict(config)}, dtype, "meta", only=("unet",))["unet"]
    names, wanted, header = unet_names(unet), unet.state_dict(), read_header(path)
    for ours, theirs in names.items():
        found, shape = header.shape(theirs), tuple(wanted[ours].shape)
        if found != shape:
            stands = f"is of shape {[*found]}" if found else "is missing"
            raise CheckpointError(f"{path} cannot be loaded: {theirs} {stands}, where its model has {[*shape]}")
    with safe_open(path, framework="pt") as file:
        weights = {ours: file.get_tensor(theirs).to(dtype) for ours, theirs in names.items()}
    unet.load_state_dict(weights, assign=True)
    return unet.eval()
