"""Puts the shallow blocks of a compressed UNet and the deep blocks of the original together, as A-SDM (2023) does.

M1 takes dn0 and the up block across from the compressed one, M2 and M3 one and two more from each side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.architectures import layers_per_block
from ..errors import BadInputError
from .changes import check_unchanged
from .cuts import put_together
from .layers import check_unet
from .prune import assemble_unet


def combine_unets(compressed: Any, original: Any, blocks: int) -> Any:
    """A UNet whose ``blocks`` outermost blocks on each side are those of ``compressed``, all else of ``original``.

    The first and last convolutions belong to the outermost blocks, the embedding of time to the original.

    Raises:
        BadInputError: no UNets that are known, other widths or kinds of blocks, a number of blocks that leaves
            nothing of either, experts and regions in blocks that are not taken, or weights that are the same in both.
    """
    for unet in (compressed, original):
        check_unet(unet)
    check_unchanged(original)
    most = min(len(compressed.down_blocks), len(original.down_blocks)) - 1  # the innermost gives its map to no other
    if not 1 <= blocks <= most:
        raise BadInputError(f"{blocks} outermost blocks cannot be of the compressed UNet: from 1 to {most} can")
    _check_alike(compressed.config, original.config, blocks)
    total = len(original.down_blocks)
    shallow = {f"down_blocks.{number}": f"down_blocks.{number}" for number in range(blocks)}
    ups = len(compressed.up_blocks)
    shallow |= {f"up_blocks.{total - 1 - number}": f"up_blocks.{ups - 1 - number}" for number in range(blocks)}
    shallow |= {name: name for name in ("conv_in", "conv_norm_out", "conv_out")}
    deep = [f"down_blocks.{number}" for number in range(blocks, total)]
    deep += [f"up_blocks.{number}" for number in range(total - blocks)]
    deep += ["mid_block", "time_embedding", "add_embedding", "class_embedding", "encoder_hid_proj"]
    _check_different(compressed.state_dict(), original.state_dict(), shallow)
    layers = layers_per_block(compressed.config)[:blocks] + layers_per_block(original.config)[blocks:]
    config = {**original.config, "layers_per_block": layers, **_changes(compressed, total, blocks)}
    config |= put_together(compressed.config, original.config, blocks)
    return assemble_unet(config, [(original, {name: name for name in deep}), (compressed, shallow)])


def _changes(compressed: Any, total: int, blocks: int) -> dict[str, Any]:
    """Settings of experts and regions in the outermost ``blocks``, for a UNet of ``total`` blocks a side."""
    from .asdm_unet import is_changed

    if not is_changed(compressed.config):
        return {}
    ups = len(compressed.up_blocks)
    outermost = {f"dn{number}": f"dn{number}" for number in range(blocks)}
    outermost |= {f"up{ups - 1 - number}": f"up{total - 1 - number}" for number in range(blocks)}
    named = compressed.config["changed_blocks"]
    left = [name for name in named if name not in outermost]
    if left:
        raise BadInputError(
            f"the compressed UNet has experts or regions in {', '.join(left)}, which would come from the original: "
            "take more blocks across, with --blocks"
        )
    shared = {name: compressed.config[name] for name in ("experts", "regions")}
    return {**shared, "changed_blocks": [outermost[name] for name in named]}


def _check_different(
    compressed: Mapping[str, Tensor], original: Mapping[str, Tensor], taken: Mapping[str, str]
) -> None:
    """Refuse to write the original again: the layers that are ``taken`` (path in the result -> in the compressed one)
    are its own, weight by weight. Without weights nothing is compared."""
    for new, old in taken.items():
        theirs = {name.removeprefix(new): weight for name, weight in original.items() if name.startswith(new + ".")}
        ours = {name.removeprefix(old): weight for name, weight in compressed.items() if name.startswith(old + ".")}
        if ours.keys() != theirs.keys():
            return
        if any(weight.is_meta or not torch.equal(weight, theirs[name]) for name, weight in ours.items()):
            return
    raise BadInputError(
        "the outermost blocks of the compressed UNet are those of the original, weight by weight: the original is what "
        "would come out"
    )


_SHARED = ("in_channels", "out_channels", "cross_attention_dim", "norm_num_groups", "prediction_type")
_OF_BLOCKS = ("block_out_channels", "down_block_types", "attention_head_dim", "transformer_layers_per_block")


def _check_alike(compressed: Any, original: Any, blocks: int) -> None:
    for name in (*_SHARED, *_OF_BLOCKS):
        ours, theirs = compressed.get(name), original.get(name)
        if name in _OF_BLOCKS and isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
            ours, theirs = [*ours[:blocks]], [*theirs[:blocks]]
        if ours != theirs:
            raise BadInputError(
                f"the two UNets do not match: {name} is {ours} in the compressed one and {theirs} in the original"
            )
