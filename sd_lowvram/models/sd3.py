"""Stable Diffusion 3 and 3.5 (medium, large) as diffusers runs them: by text, from a picture, inpainted.

Guidance is in one batch. Where layers are skipped to guide besides, that is one more call, of the pictures alone.
"""

from __future__ import annotations

from typing import Any

from . import dit
from .anatomy import has
from .joint import JointBlock

_CLIP, _T5 = 77, 256
"""Tokens of a prompt, as each encoder reads them; what CLIP makes of it is put before what T5 makes."""

_READINGS = {
    "text_encoder": dit.Reading("clip_text_model", _CLIP, hidden=True),
    "text_encoder_2": dit.Reading("clip_text_model", _CLIP, hidden=True),
    "text_encoder_3": dit.Reading("t5", _T5),
}


def is_transformer(module: Any) -> bool:
    """True for SD3's transformer."""
    matches = has(module, "pos_embed", "context_embedder", "time_text_embed", "transformer_blocks", "proj_out")
    return matches and hasattr(module.pos_embed, "cropped_pos_embed")


_CALL = {
    "hidden_states": "rows in_channels height width",
    "timestep": "rows",
    "encoder_hidden_states": f"rows {_CLIP + _T5} joint_attention_dim",
    "pooled_projections": "rows pooled_projection_dim",
    "return_dict": False,
}


def _joint_block(block: Any) -> JointBlock | None:
    """The second attention of SD3.5 medium sees the picture alone."""
    if not has(block, "norm1", "norm1_context", "attn", "attn2", "norm2", "ff"):
        return None
    last = (block.attn.to_out[0], block.attn.to_add_out) if block.attn2 is not None else ()
    return JointBlock(
        picture="hidden_states",
        text="encoder_hidden_states",
        cut={},
        attentions=(block.attn,) if block.attn2 is None else (block.attn, block.attn2),
        by_rows="JointAttnProcessor2_0",
        text_last=True,
        besides=tuple(layer for layer in last if layer is not None),
    )


FAMILY = dit.family(
    is_transformer,
    _READINGS,
    call=_CALL,
    channels=lambda config: int(config["out_channels"]),
    guided="passes",
    joint=_joint_block,
)
