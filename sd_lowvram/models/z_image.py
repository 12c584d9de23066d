"""Z-Image and Z-Image-Turbo as diffusers runs them: by text, from a picture, inpainted.

The transformer takes lists: of latents (C, 1, h, w), and of texts, each as long as its prompt. Guidance is in one batch
if its scale is above 0, until the step at which the pipeline stops it; later calls have fewer rows, and are planned
like the earlier ones.
"""

from __future__ import annotations

from typing import Any

from . import dit
from .anatomy import has
from .joint import JointBlock, select_tokens

_TOKENS = 512
_SHORTER = 32
"""The transformer pads texts to multiples of this: one that is so much shorter makes it mask the attention."""


def is_transformer(module: Any) -> bool:
    """True for Z-Image's transformer."""
    matches = has(module, "all_x_embedder", "cap_embedder", "noise_refiner", "context_refiner", "layers")
    return matches and module.siglip_embedder is None


_CALL = {
    "x": ("channels 1 height width",),
    "t": "rows",
    "cap_feats": (f"{_TOKENS} cap_feat_dim", f"{_TOKENS - _SHORTER} cap_feat_dim"),
    "return_dict": False,
}
"""With a text as long as it may be, and shorter ones."""


def _forget_positions(transformer: Any) -> None:
    transformer.rope_embedder.freqs_cis = None  # what it keeps from its first call on belongs to every trace


def _joint_block(block: Any) -> JointBlock | None:
    if not has(block, "attention", "feed_forward", "attention_norm1", "ffn_norm1"):
        return None
    cut = {"freqs_cis": select_tokens, "noise_mask": select_tokens}
    by_rows = "ZSingleStreamAttnProcessor"
    return JointBlock(picture="x", text="", cut=cut, attentions=(block.attention,), by_rows=by_rows)


FAMILY = dit.family(
    is_transformer,
    {"text_encoder": dit.Reading("qwen3", _TOKENS, hidden=True, masked=True)},
    guides_above=0,
    call=_CALL,
    channels=lambda config: int(config["in_channels"]),
    guided="passes",
    alone=("transformer", "text_encoder"),
    forget=_forget_positions,
    joint=_joint_block,
    entry_methods=("encode_prompt", "prepare_latents"),
)
