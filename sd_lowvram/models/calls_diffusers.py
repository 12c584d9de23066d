"""Inputs of the models in diffusers' pipelines, derived from the models' layers and configurations."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .anatomy import Anatomy, layer
from .calls import Arguments, Shape, StepInputs, make_batch
from .interfaces import DiffusersUNet
from .latents import dtype_of, latent_channels, latent_size

_TOKENS, _PATCHES = 77, 257
"""CLIP's numbers of tokens of a prompt, and of patches of a picture."""

_Empty = Callable[..., Tensor]


def passes(target: Any, unet: Any) -> int:
    """Rows of the denoiser's batch for each picture, with the guidance that the pipeline has by itself."""
    distilled = unet.config.get("time_cond_proj_dim") is not None or "LatentConsistency" in type(target).__name__
    if "image_guidance_scale" in _arguments(target):  # InstructPix2Pix: with text and picture, with one, with none
        return 3
    perturbed = hasattr(target, "set_pag_applied_layers")
    return (1 if distilled else 2) + int(perturbed)


def encodes(target: Any, unet: Any, channels: int) -> bool:
    """Return True if a pipeline encodes a picture before it denoises.

    That holds for img2img, inpainting, and models that take the latents of a picture in addition.

    Args:
        channels: channels of the latents.
    """
    arguments = _arguments(target)
    extra_channels = layer(unet.conv_in).in_channels - channels
    return "image" in arguments and ("strength" in arguments or extra_channels >= channels)


def run_processors(target: Any, unet: nn.Module) -> dict[str, Any]:
    """The attention processors that a pipeline sets for the time of a run, by the attention's path in the UNet: those
    of perturbed attention guidance, on the self-attentions that the pipeline's patterns name."""
    pairs = getattr(target, "_pag_attn_processors", None)
    if not pairs:
        return {}
    guided = passes(target, unet) > 2
    return {
        path: pairs[0 if guided else 1]
        for path, module in unet.named_modules()
        if getattr(module, "is_cross_attention", None) is False
        and any(_names(pattern, path) for pattern in target.pag_applied_layers)
    }


def _names(pattern: str, path: str) -> bool:
    """True if a pipeline's pattern matches a module, by the pipeline's own rule."""
    last, own = (name.rpartition(".")[2] for name in (pattern, path))
    return re.search(pattern, path) is not None and not (last.isnumeric() and last == own)


def _arguments(target: Any) -> Mapping[str, Any]:
    return {} if isinstance(target, nn.Module) else inspect.signature(type(target).__call__).parameters


def step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    """Inputs of a pipeline's denoising step."""
    unet: Any = anatomy.denoiser_module
    config, rows, size = anatomy.config(anatomy.denoiser), shape.rows, latent_size(anatomy, shape)
    empty = functools.partial(torch.empty, dtype=dtype_of(anatomy, anatomy.denoiser or ""))
    channels = latent_channels(anatomy)
    extra_channels = layer(unet.conv_in).in_channels - channels
    distilled = config.get("time_cond_proj_dim")
    return StepInputs(
        latents=empty(shape.batch, channels, *size),
        timestep=torch.tensor(1),
        text=empty(rows, text_length(anatomy), _text_width(anatomy)),
        beside=empty(rows, extra_channels, *size) if extra_channels else None,
        labels=_labels(unet, config, rows, empty),
        guidance=None if distilled is None else empty(rows, int(distilled)),
        added=_added_conditions(anatomy, rows, empty),
    )


def predict(unet: DiffusersUNet, x: Tensor, inputs: StepInputs) -> Tensor:
    """The UNet's prediction (rows, C, h, w)."""
    prediction: Tensor = unet(x, inputs.timestep, **_named_arguments(inputs))[0]
    return prediction


def _named_arguments(inputs: StepInputs) -> dict[str, Any]:
    named = {"class_labels": inputs.labels, "timestep_cond": inputs.guidance, "added_cond_kwargs": inputs.added or None}
    extra = {name: value for name, value in named.items() if value is not None}
    return {"encoder_hidden_states": inputs.text, "return_dict": False, **extra}


def conditions(unet: Any) -> object:
    """The projections of IP-Adapters: new objects whenever an adapter is loaded or unloaded."""
    return getattr(unet, "encoder_hid_proj", None)


def arguments(anatomy: Anatomy, name: str, shape: Shape) -> Arguments | None:
    """Arguments of a text encoder, which keeps what each of its layers makes, or of the UNet."""
    if name.startswith("text_encoder"):
        return (torch.zeros(1, text_length(anatomy, name), dtype=torch.long),), {"output_hidden_states": True}
    if name != anatomy.denoiser:
        return None
    inputs = step_inputs(anatomy, shape)
    return (make_batch(inputs), inputs.timestep), _named_arguments(inputs)


def text_length(anatomy: Anatomy, name: str | None = None) -> int:
    """Tokens of a prompt: 77 for CLIP."""
    name = name or next((candidate for candidate in anatomy.components if candidate.startswith("text_encoder")), None)
    return int(anatomy.config(name).get("max_position_embeddings") or _TOKENS)


def _text_width(anatomy: Anatomy) -> int:
    """Width of the UNet's text: that of its attentions, unless it projects the text itself."""
    config, own = anatomy.config(anatomy.denoiser), getattr(anatomy.denoiser_module, "text_encoder_hid_proj", None)
    projects = config.get("encoder_hid_dim_type") == "text_proj" or own
    width = config["encoder_hid_dim"] if projects else config.get("cross_attention_dim") or 768
    return width if isinstance(width, int) else max(width)


def _labels(unet: Any, config: Mapping[str, Any], rows: int, empty: _Empty) -> Tensor | None:
    """Inputs of the UNet's class embedding: numbers of kinds or noise levels, or an embedding made elsewhere."""
    if getattr(unet, "class_embedding", None) is None:
        return None
    kind = config.get("class_embed_type")
    if kind in (None, "timestep"):
        return torch.zeros(rows, dtype=torch.long)
    if kind == "identity":
        return empty(rows, layer(unet.time_embedding.linear_2).out_features)
    return empty(rows, int(config["projection_class_embeddings_input_dim"]))


def _added_conditions(anatomy: Anatomy, rows: int, empty: _Empty) -> dict[str, Any]:
    """Pooled text and sizes (SDXL's and its refiner's, which has one size less), and the pictures of IP-Adapters."""
    config = anatomy.config(anatomy.denoiser)
    added: dict[str, Any] = {}
    if config.get("addition_embed_type") == "text_time":
        width, each = (int(config[key]) for key in ("projection_class_embeddings_input_dim", "addition_time_embed_dim"))
        pooled = anatomy.config("text_encoder_2").get("projection_dim") or width - 6 * each  # that encoder pools it
        added = {"text_embeds": empty(rows, pooled), "time_ids": empty(rows, (width - pooled) // each)}
    projections = getattr(conditions(anatomy.denoiser_module), "image_projection_layers", ())
    if projections:
        patches = _patches(anatomy)
        added["image_embeds"] = [_image_embeds(projection, patches, rows, empty) for projection in projections]
    return added


def _patches(anatomy: Anatomy) -> int:
    """Tokens that the image encoder makes of a picture."""
    config = anatomy.config("image_encoder")
    if "image_size" not in config:
        return _PATCHES
    return int((config["image_size"] // config["patch_size"]) ** 2 + 1)


def _image_embeds(projection: Any, patches: int, rows: int, empty: _Empty) -> Tensor:
    """A picture for an IP-Adapter's projection: (rows, 1, width), or with its patches (rows, 1, patches, width) if the
    projection is more than one linear layer (Plus, Full)."""
    if hasattr(projection, "image_embeds"):
        return empty(rows, 1, layer(projection.image_embeds).in_features)
    if hasattr(projection, "clip_embeds"):  # FaceID Plus keeps the picture's patches itself
        if projection.clip_embeds is None:
            raise BadInputError("an IP-Adapter FaceID Plus lacks its picture: set its projection's clip_embeds first")
        return empty(rows, 1, layer(projection.proj.net[0].proj).in_features)
    faces = hasattr(projection, "num_tokens")
    width = layer(projection.proj_in if hasattr(projection, "proj_in") else projection.ff.net[0].proj).in_features
    return empty(rows, 1, width) if faces else empty(rows, 1, patches, width)
