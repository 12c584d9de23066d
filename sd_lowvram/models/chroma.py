"""Chroma as diffusers runs it: by text, from a picture, inpainted.

As FLUX.1 without CLIP; guidance is a second call, and the attention is masked by the prompt's padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from . import dit, flux
from .anatomy import Anatomy, having
from .calls import Shape, StepInputs
from .joint import JointBlock, Rows

_WORDS = 512


is_transformer = having("x_embedder", "context_embedder", "distilled_guidance_layer", "single_transformer_blocks")


def step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    """Inputs of a denoising step."""
    empty, tokens = dit.empty_of(anatomy), math.prod(dit.picture_tokens(anatomy, shape))
    added = {
        "img_ids": empty(tokens, 3),
        "txt_ids": empty(_WORDS, 3),
        "attention_mask": empty(shape.rows, _WORDS + tokens),
    }
    return dit.packed_inputs(anatomy, shape, _WORDS, added)


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
    step_inputs=step_inputs,
    channels=dit.packed_channels,
    latents_in_call=dit.packed_in_call,
    joint=_joint_block,
)
