"""Chroma as diffusers runs it: by text, from a picture, inpainted.

As FLUX.1 without CLIP; guidance is a second call, and the attention is masked by the prompt's padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from . import dit, flux
from .anatomy import having
from .joint import JointBlock, Rows

_WORDS = 512


is_transformer = having("x_embedder", "context_embedder", "distilled_guidance_layer", "single_transformer_blocks")


_CALL = {
    "hidden_states": "rows tokens in_channels",
    "timestep": "rows",
    "encoder_hidden_states": f"rows {_WORDS} joint_attention_dim",
    "txt_ids": f"{_WORDS} 3",
    "img_ids": "tokens 3",
    "attention_mask": f"rows {_WORDS}+tokens",
    "return_dict": False,
}


def _joint_block(block: Any) -> JointBlock | None:
    """FLUX.1's blocks with a mask; single blocks get text and picture as one sequence."""
    joint = flux.joint_block(block)
    if joint is None:
        return None
    text = "" if joint.besides else joint.text
    return dataclasses.replace(joint, text=text, masked_by="attention_mask", mask=_mask)


def _mask(arguments: Mapping[str, Any], rows: Rows) -> Tensor | None:
    mask = arguments.get("attention_mask")
    return None if mask is None else mask[:, None, None, :] * rows.select_joined(mask, 1)[:, None, :, None]


FAMILY = dit.family(
    is_transformer,
    {"text_encoder": dit.Reading("t5", _WORDS, masked=True)},
    call=_CALL,
    channels=dit.packed_channels,
    joint=_joint_block,
)
