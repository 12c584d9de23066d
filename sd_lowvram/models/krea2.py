"""Krea 2 as diffusers runs it: by text.

Latents are packed 2x2, the transformer is given what twelve layers of its text encoder make, and guidance is a second
call above 0: give the distilled model a scale of 0.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from . import dit
from .anatomy import has, having
from .joint import JointBlock, join_positions

_WORDS = 512
_READ = _WORDS + 34
"""Tokens that its text encoder reads: the prompt, and what is put before it, which is cut off again."""

is_transformer = having("img_in", "txt_in", "text_fusion", "time_mod_proj", "final_layer", "transformer_blocks")


_CALL = {
    "hidden_states": "rows tokens in_channels",
    "encoder_hidden_states": f"rows {_WORDS} num_text_layers text_hidden_dim",
    "timestep": "rows",
    "position_ids": f"{_WORDS}+tokens 3 float32",
    "encoder_attention_mask": f"rows {_WORDS} bool",
    "return_dict": False,
}


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
    call=_CALL,
    channels=lambda config: int(config["in_channels"]) // 4,
    is_feed_forward=having("gate", "up", "down"),
    joint=_joint_block,
)
