"""FLUX.1 as diffusers runs it: dev, schnell, Fill, Kontext and the control models, by text, from a picture, inpainted.

Latents are packed 2x2 into tokens (rows, tokens, 4 C), and what a picture is conditioned on besides is given as more
channels of the tokens (Fill, control), or as more tokens (Kontext). There is one call a step: guidance is embedded, or
there is none.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from . import diffusers, support
from .anatomy import Anatomy, Family, has
from .calls import LatentsInCall, Shape, Stage, StepInputs
from .calls_diffusers import text_stage
from .latents import dtype_of, latent_channels, latent_size

TOKENS = {"text_encoder": 77, "text_encoder_2": 512}
"""Of a prompt, by the encoder that reads it: CLIP, whose pooled output is taken, and T5."""

_NATIVE = 128
"""Latent pixels of the side for which it was made."""


def is_transformer(module: Any) -> bool:
    told = has(module, "x_embedder", "context_embedder", "time_text_embed", "transformer_blocks", "proj_out")
    return told and has(module, "single_transformer_blocks") and not hasattr(module, "distilled_guidance_layer")


SERVED: support.Served = {
    "text_encoder": diffusers.is_of_type("clip_text_model"),
    "text_encoder_2": diffusers.is_of_type("t5"),
    "transformer": is_transformer,
    "vae": diffusers.is_autoencoder,
}
"""The parts of a pipeline, in the order in which a run uses them."""


def components_of(target: Any) -> dict[str, nn.Module]:
    """The models of a pipeline of FLUX.1, its transformer by itself, or a T5; empty for all else.

    Raises:
        UnsupportedModelError, ConflictError: as :func:`.diffusers.served_of`.
    """
    if not isinstance(target, nn.Module) and not is_transformer(getattr(target, "transformer", None)):
        return {}
    return diffusers.served_of(target, SERVED, ("transformer", "text_encoder_2"))


def step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    """What a denoising step starts from."""
    config, rows = anatomy.config(anatomy.denoiser), shape.rows
    empty = functools.partial(torch.empty, dtype=dtype_of(anatomy, anatomy.denoiser or ""))
    height, width = (side // 2 for side in latent_size(anatomy, shape))
    channels, tokens = 4 * latent_channels(anatomy), height * width
    beside = int(config["in_channels"]) - channels
    words = TOKENS["text_encoder_2"]
    added = {
        "pooled_projections": empty(rows, int(config["pooled_projection_dim"])),
        "img_ids": empty(tokens * (1 + anatomy.joined), 3),
        "txt_ids": empty(words, 3),
    }
    if config["guidance_embeds"]:
        added["guidance"] = torch.empty(rows)
    return StepInputs(
        latents=empty(shape.batch, tokens, channels),
        timestep=torch.tensor(1.0),
        text=empty(rows, words, int(config["joint_attention_dim"])),
        beside=empty(rows, tokens, beside) if beside else None,
        joined=empty(rows, tokens * anatomy.joined, channels) if anatomy.joined else None,
        added=added,
    )


def predict(transformer: Any, x: Tensor, inputs: StepInputs) -> Tensor:
    """The transformer's prediction (rows, tokens, 4 C)."""
    time = inputs.timestep.expand(len(x)).to(x.dtype)
    prediction: Tensor = transformer(
        hidden_states=x, encoder_hidden_states=inputs.text, timestep=time, return_dict=False, **inputs.added
    )[0]
    return prediction


def latents_in_call(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LatentsInCall | None:
    """The packed latents in a call, and the size of the picture that the ids of their tokens tell."""
    given = dict(zip(("hidden_states", "", "", "", "img_ids"), args, strict=False)) | kwargs
    latents, ids = given.get("hidden_states"), given.get("img_ids")
    if not (isinstance(latents, Tensor) and isinstance(ids, Tensor)):
        return None  # the call itself says what is missing

    def size() -> tuple[int, int]:
        rows, columns = (ids[..., 1:].reshape(-1, 2).max(0).values + 1).int().tolist()
        return 2 * rows, 2 * columns

    return LatentsInCall(latents, len(latents), 4 * latents.shape[1], size)


def helper_stages(anatomy: Anatomy, shape: Shape) -> list[Stage]:
    """The stages of the text encoders."""
    parts = anatomy.components
    return [text_stage(name, parts[name], tokens, hidden=False) for name, tokens in TOKENS.items() if name in parts]


def _anatomy_fields(target: Any, anatomy: Anatomy) -> dict[str, Any]:
    takes = () if isinstance(target, nn.Module) else inspect.signature(type(target).__call__).parameters
    pictures = {"image", "control_image"}.intersection(takes)
    return {"passes": 1, "encodes": bool(pictures), "joined": int("Kontext" in type(target).__name__)}


def _configs(components: Any) -> dict[str, dict[str, Any]]:
    """That of a transformer, with the channels and the size of what it packs."""
    if "transformer" not in components:
        return {}
    config = components["transformer"].config
    channels = int(config["out_channels"] or config["in_channels"]) // 4
    return {"transformer": {**config, "out_channels": channels, "sample_size": _NATIVE}}


FAMILY = Family(
    components_of=components_of,
    unchecked_components_of=functools.partial(diffusers.unchecked_components_of, served=SERVED),
    entry_methods=("check_inputs",),
    denoiser="transformer",
    step_inputs=step_inputs,
    predict=predict,
    latents_in_call=latents_in_call,
    latent_multiple=2,
    decode=diffusers.decode,
    encode=diffusers.encode,
    helper_stages=helper_stages,
    configs=_configs,
    anatomy_fields=_anatomy_fields,
)
