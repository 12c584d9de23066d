"""FLUX.2 Klein (4B, 9B) as diffusers runs it: by text, with pictures to look at, inpainted.

Latents are packed 2x2; pictures to look at are joined to them as more tokens. Guidance is a second call, and distilled
models have none.
"""

from __future__ import annotations

from typing import Any

from . import dit, flux
from .anatomy import Anatomy, has, having
from .joint import JointBlock, join_positions

_WORDS = 512


is_transformer = having("x_embedder", "context_embedder", "time_guidance_embed", "double_stream_modulation_img")


CALL = {
    "hidden_states": "rows tokens in_channels",
    "timestep": "rows",
    "guidance": lambda sizes: "rows float32" if sizes["guidance_embeds"] else None,
    "encoder_hidden_states": "rows 512 joint_attention_dim",
    "txt_ids": "rows 512 4 long",
    "img_ids": "rows tokens 4 long",
    "return_dict": False,
}


def _anatomy_fields(target: Any, anatomy: Anatomy) -> dict[str, Any]:
    distilled = getattr(getattr(target, "config", None), "is_distilled", False)
    guides = dit.guides(target) and not distilled and not anatomy.config(anatomy.denoiser).get("guidance_embeds")
    inpaints = dit.starts_from_picture(target)  # the picture is joined too
    return {"passes": 1, "calls": 1 + guides, "encodes": inpaints, "joined": int(inpaints)}


def _joint_block(block: Any) -> JointBlock | None:
    """Joint block; single blocks get text and picture as one sequence, with one layer for queries, keys and values."""
    single = has(block, "norm", "attn") and hasattr(block.attn, "to_qkv_mlp_proj")
    if not single and not flux.is_double(block):
        return None
    return JointBlock(
        picture="hidden_states",
        text="" if single else "encoder_hidden_states",
        cut={"image_rotary_emb": join_positions},
        attentions=(block.attn,),
        by_rows="Flux2ParallelSelfAttnProcessor" if single else "Flux2AttnProcessor",
    )


FAMILY = dit.family(
    is_transformer,
    {"text_encoder": dit.Reading("qwen3", _WORDS, hidden=True, masked=True, options={"use_cache": False})},
    call=CALL,
    channels=dit.packed_channels,
    anatomy_fields=_anatomy_fields,
    unplanned=lambda target: ("transformer",) if "KV" in type(target).__name__ else (),  # it keeps keys and values
    own=lambda target: "is_distilled" in target.config,  # Z-Image has the same text encoder
    joint=_joint_block,
)
