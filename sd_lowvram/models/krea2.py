"""Krea 2 as diffusers runs it: by text.

Latents are packed 2x2, the transformer is given what twelve layers of its text encoder make, and guidance is a second
call above 0: give the distilled model a scale of 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from . import dit
from .anatomy import Anatomy, has, having
from .calls import LatentsInCall, Shape, StepInputs
from .joint import JointBlock, join_positions

_WORDS = 512
_READ = _WORDS + 34
"""Tokens that its text encoder reads: the prompt, and what is put before it, which is cut off again."""

is_transformer = having("img_in", "txt_in", "text_fusion", "time_mod_proj", "final_layer", "transformer_blocks")


def step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    """Inputs of a denoising step; the prompt is padded, and the padding is masked."""
    added = {
        "position_ids": torch.empty(_WORDS + math.prod(dit.picture_tokens(anatomy, shape)), 3),
        "encoder_attention_mask": torch.empty(shape.rows, _WORDS, dtype=torch.bool),
    }
    return dit.packed_inputs(anatomy, shape, _WORDS, added, ("num_text_layers", "text_hidden_dim"))


def latents_in_call(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LatentsInCall | None:
    """The packed latents in a call, and the size of the picture, from their positions."""
    arguments = dit.given_by_name(transformer, args, kwargs)
    return dit.packed_in_call(transformer, (), {**arguments, "img_ids": arguments.get("position_ids")})


def _joint_block(block: nn.Module) -> JointBlock | None:
    """Joint block; the text is joined to the picture."""
    if not has(block, "scale_shift_table", "norm1", "norm2", "attn", "ff"):
        return None
    attention: Any = block.attn
    return JointBlock(
        picture="hidden_states",
        text="",
        cut={"image_rotary_emb": join_positions},
        attentions=(attention,),
        by_rows="Krea2AttnProcessor",
        besides=(attention.to_gate,),
    )


FAMILY = dit.family(
    is_transformer,
    {"text_encoder": dit.Reading("qwen3_vl", _READ, hidden=True, masked=True)},
    guides_above=0,
    step_inputs=step_inputs,
    channels=lambda config: int(config["in_channels"]) // 4,
    latents_in_call=latents_in_call,
    is_feed_forward=having("gate", "up", "down"),
    joint=_joint_block,
)
