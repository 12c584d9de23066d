"""Chroma as diffusers runs it: by text, from a picture, inpainted.

As FLUX.1 without CLIP; guidance is a second call, and the attention is masked by the prompt's padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from . import dit, flux
from .anatomy import Anatomy, has, having
from .calls import Shape, StepInputs
from .joint import JointBlock, Rows, join_positions

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
    """Joint block; single blocks get text and picture as one sequence."""
    single = has(block, "norm", "proj_mlp", "act_mlp", "proj_out", "attn")
    if not single and not flux.is_double(block):
        return None
    return JointBlock(
        picture="hidden_states",
        text="" if single else "encoder_hidden_states",
        cut={"image_rotary_emb": join_positions},
        attentions=(block.attn,),
        by_rows="FluxAttnProcessor",
        masked_by="attention_mask",
        mask=_mask,
        besides=(block.proj_mlp,) if single else (),
    )


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
