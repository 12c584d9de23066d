"""FLUX.1 as diffusers runs it: dev, schnell, Fill, Kontext and the control models, by text, from a picture, inpainted.

Latents are packed 2x2 into tokens (rows, tokens, 4 C), and what a picture is conditioned on besides is given as more
channels of the tokens (Fill, control), or as more tokens (Kontext). There is one call a step: guidance is embedded, or
there is none.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from . import dit
from .anatomy import Anatomy, has
from .joint import JointBlock, join_positions

_READINGS = {"text_encoder": dit.Reading("clip_text_model", 77), "text_encoder_2": dit.Reading("t5", 512)}
"""CLIP contributes its pooled output, T5 all tokens of the prompt."""


def is_transformer(module: Any) -> bool:
    """True for FLUX.1's transformer."""
    matches = has(module, "x_embedder", "context_embedder", "time_text_embed", "transformer_blocks", "proj_out")
    return matches and has(module, "single_transformer_blocks") and not hasattr(module, "distilled_guidance_layer")


CALL = {
    "hidden_states": "rows tokens in_channels",
    "timestep": "rows",
    "guidance": lambda sizes: "rows float32" if sizes["guidance_embeds"] else None,
    "pooled_projections": "rows pooled_projection_dim",
    "encoder_hidden_states": "rows 512 joint_attention_dim",
    "txt_ids": "512 3",
    "img_ids": "tokens 3",
    "return_dict": False,
}


def _anatomy_fields(target: Any, anatomy: Anatomy) -> dict[str, Any]:
    pictures = {"image", "control_image"} & dit.arguments(target).keys()
    return {"passes": 1, "encodes": bool(pictures), "joined": int("Kontext" in type(target).__name__)}


def is_double(block: nn.Module) -> bool:
    """True for a block with separate layers for text and picture."""
    return has(block, "norm1", "norm1_context", "attn", "norm2", "ff", "ff_context")


def joint_block(block: Any) -> JointBlock | None:
    """Return the way to call a block with some of its tokens; None if it is of another kind."""
    single = has(block, "norm", "proj_mlp", "act_mlp", "proj_out", "attn")
    if not single and not is_double(block):
        return None
    return JointBlock(
        picture="hidden_states",
        text="encoder_hidden_states",
        cut={"image_rotary_emb": join_positions},
        attentions=(block.attn,),
        by_rows="FluxAttnProcessor",
        besides=(block.proj_mlp,) if single else (),
    )


FAMILY = dit.family(
    is_transformer,
    _READINGS,
    call=CALL,
    channels=dit.packed_channels,
    anatomy_fields=_anatomy_fields,
    alone=("transformer", "text_encoder_2"),
    joint=joint_block,
)
