"""Loads the autoencoder alone: of a checkpoint, of a diffusers folder, or from a file of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .architectures import architecture
from .load import explain_errors, load_folder_part
from .safetensors_header import TensorEntry, read_header
from .scaled_files import check_formats
from .single_file import file_weights, load_vae
from .single_file_names import VAE

if TYPE_CHECKING:
    import torch
    from torch import nn

_LEVEL = re.compile(r"decoder\.up\.(\d)\.block\.0\.conv1\.weight")


def load_autoencoder(path: Path, dtype: torch.dtype) -> nn.Module:
    """Load an autoencoder on the CPU.

    Args:
        path: a diffusers folder or a ``.safetensors`` file.
        dtype: type of the weights.

    Raises:
        CheckpointError: it is missing, unreadable, a pickle, or has no autoencoder for pictures.
    """
    if path.is_dir():
        part = path / "vae" if (path / "vae").is_dir() else path
        with explain_errors(path):
            folder: nn.Module = load_folder_part(part, "diffusers", "AutoencoderKL", dtype)
        return folder
    if path.suffix.lower() != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file: give one, or a diffusers folder, with --model")
    header = read_header(path)
    check_formats(path, header, "or in fp16")
    config = _configuration(path, header.tensors)
    with explain_errors(path):
        weights = file_weights(path, dtype)
        if not any(name.startswith(VAE) for name in weights):  # a file of the autoencoder alone
            weights = {VAE + name: weight for name, weight in weights.items()}
        file: nn.Module = load_vae(config, weights, path, dtype)
    return file


def _configuration(path: Path, tensors: dict[str, TensorEntry]) -> dict[str, Any]:
    """The configuration of the autoencoder in a file, by the shapes of its weights."""
    inner = {name.removeprefix("first_stage_model.").removeprefix("vae."): entry for name, entry in tensors.items()}
    levels = {int(match[1]): entry for name, entry in inner.items() if (match := _LEVEL.fullmatch(name))}
    first = inner.get("decoder.conv_in.weight")
    whole = all(_is_a_level(entry.shape) for entry in levels.values())
    if first is None or sorted(levels) != [0, 1, 2, 3] or len(first.shape) != 4 or not whole:
        raise CheckpointError(f"{path} has no autoencoder of Stable Diffusion's kind: give the checkpoint with --model")
    quantised = {f"use_{name}": f"{name}.weight" in inner for name in ("quant_conv", "post_quant_conv")}
    sizes = {"block_out_channels": [levels[level].shape[0] for level in range(4)], "latent_channels": first.shape[1]}
    return {**architecture("sd15")["vae"], **quantised, **sizes}


def _is_a_level(shape: Sequence[int]) -> bool:
    """True if ``shape`` fits a level's first convolution; otherwise a tiny file could describe a model of any width."""
    return len(shape) == 4 and shape[1] >= shape[0] and tuple(shape[2:]) == (3, 3)
