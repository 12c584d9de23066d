"""The weights of a single file of SD1.x, SD2.x or SDXL, and the models that they are filled into.

Weights stay mapped from their file if their type is the requested one. Weights of 8 bits with scales next to
them are widened: what acts on layers of these families takes weights of the type in which they compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .architectures import empty_model
from .complete import check_complete, check_found
from .scaled_files import split_scales
from .single_file_names import UNET, VAE, text_names, unet_names, usual_names, vae_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_IGNORED = ("position_ids", "logit_scale", "text_projection", "text_projection.weight", "attn_mask")
"""Ends of the names of entries that are ignored."""

_QKV = re.compile(r"self_attn\.([qkv])_proj\.")


def file_weights(path: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Read the weights of a single file, under the usual names. Weights with scales are multiplied by them.

    Args:
        path: a ``.safetensors`` file.
        dtype: type of the weights; None: float32.

    Raises:
        CheckpointError: a scale has no weight, or a weight of 8 bits has no scale or not that of its rows.
    """
    from safetensors.torch import load_file

    return plain_weights(load_file(path), path, dtype)


def plain_weights(state: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights of ``state``, those of the file at ``path``, as :func:`file_weights` gives them."""
    import torch

    from ..kernels.scaled import widen_scaled

    names = usual_names(state)
    weights, scales = split_scales({names[name]: tensor for name, tensor in state.items()})
    for name, scale in scales.items():
        weight = weights.get(name)
        if weight is None:
            raise CheckpointError(f"{path} holds a scale for {name}, and no weight of this name: download it again")
        rows = [1] * (weight.ndim - 1)
        if scale.numel() != 1 and (not weight.ndim or scale.numel() != len(weight)):
            raise CheckpointError(
                f"{path} holds {name} of shape {[*weight.shape]} with scales of shape {[*scale.shape]}, which is a "
                "format that is not read here: get the file in fp16 or bf16"
            )
        shaped = scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, *rows)
        weights[name] = widen_scaled(weight, shaped, torch.float32).to(dtype or torch.float32)
    narrow = next((name for name, weight in weights.items() if weight.dtype in (torch.int8, torch.uint8)), None)
    if narrow is not None and narrow.startswith((UNET, VAE, "cond_stage_model.", "conditioner.")):
        raise CheckpointError(f"{path} holds {narrow} in 8 bits without a scale: get the file in fp16 or bf16")
    return weights


def load_unet(config: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None) -> Any:
    """Build the UNet of a single file.

    Args:
        config: its configuration.
        weights: from :func:`file_weights`.
        path: the file, for errors.
        dtype: type of the weights; None: float32.

    Raises:
        CheckpointError: weights are missing, have other shapes, or belong to layers that such a UNet does not have.
    """
    unet = _empty(config)
    names = unet_names(unet)
    _fill(unet, names, weights, path, dtype)
    _check_leftovers(path, "UNet", [name for name in weights if name.startswith(UNET)], names, strict=True)
    return unet.eval()


def load_vae(config: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None) -> Any:
    """The autoencoder of ``config``, as :func:`load_unet` loads a UNet."""
    vae = _empty(config)
    names = vae_names(vae)
    _fill(vae, names, weights, path, dtype)
    _check_leftovers(path, "VAE", [name for name in weights if name.startswith(VAE)], names)
    return vae.eval()


def load_text(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path, prefix: str, dtype: torch.dtype | None
) -> Any:
    """The text encoder of ``config`` whose names begin with ``prefix``, as :func:`load_unet` loads a UNet."""
    text = _empty(config)
    names = text_names(text, prefix, weights)
    _fill(text, names, weights, path, dtype)
    _check_leftovers(path, "text encoder", [name for name in weights if name.startswith(prefix)], names)
    return text.eval()


def _empty(config: Mapping[str, Any]) -> Any:
    """The model without weights; what it computes when it is made is there."""
    import accelerate

    with accelerate.init_empty_weights(include_buffers=False):
        return empty_model(dict(config))


def _fill(
    model: nn.Module, names: Mapping[str, str], weights: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None
) -> None:
    """Give ``model`` its weights, whose names in the file are the values of ``names``."""
    import torch

    wanted, filled = model.state_dict(), {}
    for ours, theirs in names.items():
        if theirs not in weights:
            continue
        weight, shape = _piece(ours, theirs, weights[theirs]), tuple(wanted[ours].shape)
        if tuple(weight.shape) != shape and _sides(weight.shape) == _sides(shape):  # 1x1 convolutions and matrices
            weight = weight.reshape(shape)
        if tuple(weight.shape) != shape:
            raise CheckpointError(
                f"{path} cannot be loaded: {theirs} is of shape {[*weights[theirs].shape]} where this kind of model "
                f"has {[*shape]}. A model with changed layers loads from a diffusers folder, which states its shapes"
            )
        filled[ours] = weight.to(dtype or torch.float32) if weight.is_floating_point() else weight
    check_found(path, model, [*dict.fromkeys(name for name in names.values() if name not in weights)])
    model.load_state_dict(filled, strict=False, assign=True)
    check_complete(path, model)


def _piece(ours: str, theirs: str, weight: Tensor) -> Tensor:
    """The model's part of a weight in a file: a third of OpenCLIP's joint q, k, v; or its transposed projection."""
    part = _QKV.search(ours)
    if part is not None and ".attn.in_proj_" in theirs and len(weight) % 3 == 0:
        return weight.chunk(3)["qkv".index(part[1])].clone()
    return weight.t().contiguous() if theirs.endswith(".text_projection") and weight.ndim == 2 else weight


def _sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], *(side for side in shape[2:] if side != 1))


def _check_leftovers(path: Path, what: str, held: list[str], names: Mapping[str, str], strict: bool = False) -> None:
    """Raise CheckpointError where the file has weights that change what a model does, and that the model has not.

    Args:
        held: names in the file that are of this part.
        names: those of the weights that were read, as values.
        strict: every weight of the part counts, else only those in a layer of which a weight was read.
    """
    read = set(names.values())
    layers = {name.rpartition(".")[0] for name in read}
    left = [
        name
        for name in held
        if name not in read and not name.endswith(_IGNORED) and (strict or name.rpartition(".")[0] in layers)
    ]
    if left:
        raise CheckpointError(
            f"{path} holds {len(left)} weight{'s' * (len(left) > 1)} that its {what} has no place for: {left[0]}"
            f"{', for one' * (len(left) > 1)}. It is of another kind of model, or stored in a way that is not read here"
        )
