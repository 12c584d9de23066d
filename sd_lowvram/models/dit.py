"""Common parts of diffusers' pipelines of diffusion transformers: parts, text encoders, calls, guidance.

A family adds the marks of its transformer, and what it is called with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from . import diffusers, support
from .anatomy import Anatomy, Family, has
from .calls import Shape
from .latents import dtype_of, latent_channels, latent_size

_NATIVE = 128
"""Latent pixels of the side for which they were made, where a configuration does not say it."""


class Reading(NamedTuple):
    """A pipeline's call of a text encoder.

    Attributes:
        kind: the type in its configuration.
        tokens: length to which a prompt is padded, or its largest length.
        hidden: True if the outputs of all layers are stored.
        masked: True if it gets a mask of the padding.
        options: further arguments of the call.
    """

    kind: str
    tokens: int
    hidden: bool = False
    masked: bool = False
    options: Mapping[str, Any] = {}


def family(
    transformer: Callable[[Any], bool],
    readings: Mapping[str, Reading],
    *,
    call: Mapping[str, Any],
    channels: Callable[[Mapping[str, Any]], int],
    guided: str = "calls",
    alone: tuple[str, ...] = ("transformer",),
    unplanned: Callable[[Any], tuple[str, ...]] = lambda target: (),
    own: Callable[[Any], bool] = lambda target: True,
    **more: Any,
) -> Family:
    """A family of pipelines that denoise with a transformer.

    Args:
        transformer: true for a transformer of the family.
        readings: of the text encoders, by name, in the order in which a run uses them.
        call: arguments of the transformer, by name (:func:`make_arguments`); the latents are the first.
        channels: from the transformer's configuration to the channels of the latents.
        guided: what guidance adds to a step: "calls" of the transformer, or rows ("passes").
        alone: the names of models that are served by themselves.
        unplanned: from a pipeline of such parts to the names of those that it runs in a way which is not planned.
        own: true if a pipeline without its transformer is of this family; asked if two have the same text encoders.
        more: fields of the family that are not as most have them.
    """
    readers = {name: diffusers.is_of_type(how.kind) for name, how in readings.items()}
    served: support.Served = {**readers, "transformer": transformer, "vae": diffusers.is_autoencoder}
    fields: dict[str, Any] = {
        "components_of": functools.partial(_components_of, served=served, alone=alone, unplanned=unplanned, own=own),
        "unchecked_components_of": functools.partial(diffusers.unchecked_components_of, served=served),
        "entry_methods": ("check_inputs",),
        "denoiser": "transformer",
        "step_inputs": None,
        "predict": None,
        "arguments": functools.partial(_arguments, readings, call),
        "latent_multiple": 2,
        "decode": diffusers.decode,
        "encode": diffusers.encode,
        "configs": functools.partial(_configs, channels),
        "anatomy_fields": functools.partial(_anatomy_fields, guided),
        "is_attention": transformer,
        "upcasts": lambda transformer: True,
        "is_feed_forward": _is_feed_forward,
    }
    return Family(**fields | more)


def _components_of(
    target: Any,
    served: support.Served,
    alone: tuple[str, ...],
    unplanned: Callable[[Any], tuple[str, ...]],
    own: Callable[[Any], bool],
) -> dict[str, nn.Module]:
    """The models of a pipeline, or one that is served by itself; empty for all else.

    Raises:
        UnsupportedModelError, ConflictError: as :func:`.diffusers.find_served`.
    """
    if not isinstance(target, nn.Module):
        transformer = getattr(target, "transformer", None)
        alike = served["transformer"](transformer) if transformer is not None else _reads_alike(target, served)
        if not alike or (transformer is None and not own(target)):
            return {}
        for name in unplanned(target):
            if (part := getattr(target, name, None)) is not None:
                works = support.names_planned_alone({"vae": getattr(target, "vae", None)})
                raise support.unsupported_error(target, name, part, works)
    return diffusers.find_served(target, served, alone)


def _reads_alike(target: Any, served: support.Served) -> bool:
    """True if a pipeline without its transformer has the text encoders of ``served``: the same names, and of each that
    is loaded the same kind. Scripts read prompts first, by text encoders alone, if memory is short."""
    parts = getattr(target, "components", None)
    named = parts if isinstance(parts, dict) else {}
    places = {name for name in named if name.startswith("text_encoder")}
    readers = {name: named[name] for name in places if isinstance(named[name], nn.Module)}
    alike = "transformer" in named and places == {name for name in served if name.startswith("text_encoder")}
    return alike and bool(readers) and all(served[name](part) for name, part in readers.items())


def _arguments(
    readings: Mapping[str, Reading], call: Mapping[str, Any], anatomy: Anatomy, name: str, shape: Shape
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of a text encoder, or of the transformer, on the device of the context; None for other models."""
    if name == "transformer":
        return (), make_arguments(call, anatomy, shape)
    if (how := readings.get(name)) is None:
        return None
    tokens = torch.zeros(1, how.tokens, dtype=torch.long)
    mask = {"attention_mask": torch.ones_like(tokens)} if how.masked else {}
    return (tokens,), {"output_hidden_states": how.hidden, **mask, **how.options}


def make_arguments(call: Mapping[str, Any], anatomy: Anatomy, shape: Shape) -> dict[str, Any]:
    """Return what a transformer is called with.

    Args:
        call: by name, the sizes of a tensor and its type if it is not the transformer's: ``"rows tokens in_channels"``,
            ``"512+tokens 3 long"``. A size is a number or a sum of them, a name in the transformer's configuration,
            ``rows`` of the batch, ``pictures``, ``tokens`` of 2x2 latent pixels, those ``down`` and ``across``, or
            ``channels``, ``height`` and ``width`` of the latents. A tuple becomes a list with a tensor for each row;
            its last entry is for all further rows. A function is called with these sizes, and returns one of these, or
            what is given as it is.
        anatomy: with the transformer.
        shape: of the picture.
    """
    (height, width), config = latent_size(anatomy, shape), anatomy.config(anatomy.denoiser)
    sizes = {
        **config,
        "rows": shape.rows,
        "pictures": shape.batch,
        "tokens": (height // 2) * (width // 2) * (1 + anatomy.joined),
        "down": height // 2,
        "across": width // 2,
        "channels": latent_channels(anatomy),
        "height": height,
        "width": width,
    }
    dtype = dtype_of(anatomy, anatomy.denoiser or "")
    return {name: _make_argument(stated, sizes, dtype) for name, stated in call.items()}


def _make_argument(stated: Any, sizes: Mapping[str, Any], dtype: torch.dtype) -> Any:
    if callable(stated):
        return _make_argument(stated(sizes), sizes, dtype)
    if isinstance(stated, tuple):
        return [_make_argument(stated[min(row, len(stated) - 1)], sizes, dtype) for row in range(sizes["rows"])]
    if not isinstance(stated, str):
        return stated
    words = stated.split()
    if isinstance(named := getattr(torch, words[-1], None), torch.dtype):
        words, dtype = words[:-1], named
    return torch.empty([sum(_size(part, sizes) for part in word.split("+")) for word in words], dtype=dtype)


def _size(part: str, sizes: Mapping[str, Any]) -> int:
    return int(part if part.isdigit() else sizes[part])


def _configs(channels: Callable[[Mapping[str, Any]], int], components: Any) -> dict[str, dict[str, Any]]:
    """Configuration of a transformer, with the channels and the size of its latents."""
    if "transformer" not in components:
        return {}
    config = components["transformer"].config
    return {"transformer": {"sample_size": _NATIVE, **config, "out_channels": channels(config)}}


def _anatomy_fields(guided: str, target: Any, anatomy: Anatomy) -> dict[str, Any]:
    """Fields of the anatomy that describe runs of ``target``, a pipeline or a transformer."""
    guides_by_itself = guides(target, anatomy.family.guidance_scale, anatomy.family.guides_above)
    return {"passes": 1, "encodes": starts_from_picture(target), guided: 1 + guides_by_itself}


def _is_feed_forward(module: nn.Module) -> bool:
    """diffusers' own, and the gated ones of Z-Image and FLUX.2."""
    return diffusers.is_feed_forward(module) or has(module, "w1", "w2", "w3") or has(module, "linear_in", "linear_out")


def packed_channels(config: Mapping[str, Any]) -> int:
    """Channels of latents that are packed 2x2, of what a transformer of packed latents predicts."""
    return int(config["out_channels"] or config["in_channels"]) // 4


def arguments(target: Any) -> Mapping[str, inspect.Parameter]:
    """Arguments of a pipeline's call; empty for a model by itself."""
    return {} if isinstance(target, nn.Module) else inspect.signature(type(target).__call__).parameters


def guides(target: Any, scale: str = "guidance_scale", above: float = 1) -> bool:
    """True if a pipeline guides by default, because its default scale is larger than ``above``.

    A transformer by itself counts as guided.
    """
    takes = arguments(target)
    return not takes or (scale in takes and (takes[scale].default or 0) > above)


def starts_from_picture(target: Any) -> bool:
    """True if the runs of a pipeline start from a picture, which its autoencoder encodes: img2img and inpainting."""
    return {"image", "strength"} <= arguments(target).keys()
