"""Z-Image and Z-Image-Turbo as diffusers runs them: by text, from a picture, inpainted.

The transformer takes lists: of latents (C, 1, h, w), and of texts, each as long as its prompt. Guidance is in one batch
if its scale is above 0, until the step at which the pipeline stops it; later calls have fewer rows, and are planned
like the earlier ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dit
from .anatomy import Anatomy, has
from .calls import LatentsInCall, Shape, StepInputs
from .joint import JointBlock, select_tokens
from .latents import latent_channels, latent_size

_TOKENS = 512
_SHORTER = 32
"""The transformer pads texts to multiples of this: one that is so much shorter makes it mask the attention."""


def is_transformer(module: Any) -> bool:
    """True for Z-Image's transformer."""
    matches = has(module, "all_x_embedder", "cap_embedder", "noise_refiner", "context_refiner", "layers")
    return matches and module.siglip_embedder is None


def step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    """Inputs of a denoising step; the pipeline holds its latents in float32."""
    config = anatomy.config(anatomy.denoiser)
    return StepInputs(
        latents=torch.empty(shape.batch, latent_channels(anatomy), *latent_size(anatomy, shape)),
        timestep=torch.tensor(1.0),
        text=dit.empty_of(anatomy)(shape.rows, _TOKENS, int(config["cap_feat_dim"])),
    )


def predict(transformer: Any, x: Tensor, inputs: StepInputs) -> Tensor:
    """The transformer's prediction (rows, C, h, w), of a text as long as it may be, and shorter ones."""
    transformer.rope_embedder.freqs_cis = None  # what it keeps from its first call on belongs to every trace
    first, *remaining = inputs.text.unbind()
    texts = [first, *(text[:-_SHORTER] for text in remaining)]
    maps = list(x.to(first.dtype).unsqueeze(2).unbind())
    predicted = transformer(maps, inputs.timestep.expand(len(x)), texts, return_dict=False)[0]
    return torch.stack([picture.float() for picture in predicted]).squeeze(2)


def latents_in_call(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LatentsInCall | None:
    """The latents in a call: a list of one for each row, of which all have one size."""
    maps = dit.given_by_name(transformer, args, kwargs).get("x")
    if not (isinstance(maps, list) and maps and isinstance(maps[0], Tensor)):
        return None
    height, width = maps[0].shape[-2:]
    return LatentsInCall(maps[0], len(maps), height * width, lambda: (int(height), int(width)))


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
    step_inputs=step_inputs,
    channels=lambda config: int(config["in_channels"]),
    guided="passes",
    alone=("transformer", "text_encoder"),
    predict=predict,
    joint=_joint_block,
    latents_in_call=latents_in_call,
    entry_methods=("encode_prompt", "prepare_latents"),
)
