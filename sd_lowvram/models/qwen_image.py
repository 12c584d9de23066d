"""Qwen-Image as diffusers runs it: by text, from a picture, inpainted.

Latents are packed 2x2, their size is in ``img_shapes``, and guidance is a second call. Pipelines that edit are
refused, as their text encoder looks at pictures.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import dit
from .anatomy import has
from .joint import JointBlock, Rows, select_tokens

_WORDS = 512
_READ = 1024 + 34
"""Tokens that its text encoder reads at most: the prompt, and what is put before it, which is cut off again."""


def is_transformer(module: Any) -> bool:
    """True for Qwen-Image's transformer."""
    matches = has(module, "img_in", "txt_in", "txt_norm", "time_text_embed", "transformer_blocks", "proj_out")
    return matches and hasattr(getattr(module, "pos_embed", None), "pos_freqs")  # ComfyUI has no such layer in its own


_CALL = {
    "hidden_states": "rows tokens in_channels",
    "timestep": "rows",
    "encoder_hidden_states": f"rows {_WORDS} joint_attention_dim",
    "encoder_hidden_states_mask": lambda sizes: f"rows {_WORDS}" if sizes["pictures"] > 1 else None,
    "img_shapes": lambda sizes: [[(1, sizes["down"], sizes["across"])]] * sizes["rows"],
    "return_dict": False,
}
"""Prompts of unequal length need an attention mask."""


def _forget_positions(transformer: Any) -> None:
    transformer.pos_embed = copy.copy(transformer.pos_embed)  # what it keeps from its first call on is in every trace


def _joint_block(block: Any) -> JointBlock | None:
    if not has(block, "img_mod", "txt_mod", "attn", "img_mlp", "txt_mlp"):
        return None
    return JointBlock(
        picture="hidden_states",
        text="encoder_hidden_states",
        cut={"image_rotary_emb": _positions, "modulate_index": select_tokens},
        attentions=(block.attn,),
        by_rows="QwenDoubleStreamAttnProcessor2_0",
        masked_by="encoder_hidden_states_mask",
        mask=_mask,
    )


def _positions(positions: tuple[Tensor, Tensor], rows: Rows) -> tuple[Tensor, Tensor]:
    picture, text = positions
    return picture[rows.start : rows.stop], text[: rows.words]


def _mask(arguments: Mapping[str, Any], rows: Rows) -> Tensor | None:
    words, picture = arguments.get("encoder_hidden_states_mask"), arguments["hidden_states"]
    if words is None:
        return None
    return torch.cat([words, words.new_ones(picture.shape[:2])], 1)[:, None, None, :]


FAMILY = dit.family(
    is_transformer,
    {"text_encoder": dit.Reading("qwen2_5_vl", _READ, hidden=True, masked=True)},
    call=_CALL,
    channels=lambda config: int(config["in_channels"]) // 4,
    alone=("transformer", "text_encoder"),
    unplanned=lambda target: ("text_encoder", "transformer") if "processor" in target.components else (),
    forget=_forget_positions,
    joint=_joint_block,
    guidance_scale="true_cfg_scale",
)
