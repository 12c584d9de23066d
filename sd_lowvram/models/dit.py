"""Common parts of diffusers' pipelines of diffusion transformers: parts, text encoders, packed latents, guidance.

A family adds the marks of its transformer, and the inputs of its steps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import diffusers, support
from .anatomy import Anatomy, Family, has
from .calls import TEXT_STAGE, LatentsInCall, Shape, Stage, StepInputs
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
    step_inputs: Callable[[Anatomy, Shape], StepInputs],
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
        "step_inputs": step_inputs,
        "predict": predict,
        "latent_multiple": 2,
        "decode": diffusers.decode,
        "encode": diffusers.encode,
        "helper_stages": functools.partial(_text_stages, readings),
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


def _text_stages(readings: Mapping[str, Reading], anatomy: Anatomy, shape: Shape) -> list[Stage]:
    parts = anatomy.components
    return [_text_stage(name, parts[name], how) for name, how in readings.items() if name in parts]


def _text_stage(name: str, encoder: nn.Module, how: Reading) -> Stage:
    def run(encoder: nn.Module, tokens: Tensor) -> Any:
        extra = {"attention_mask": torch.ones_like(tokens)} if how.masked else {}
        return encoder(tokens, output_hidden_states=how.hidden, **extra, **how.options)

    return Stage(TEXT_STAGE, name, run, lambda: (encoder, torch.zeros(1, how.tokens, dtype=torch.long)))


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


def empty_of(anatomy: Anatomy) -> Callable[..., Tensor]:
    """Makes empty tensors of the type that the denoiser is called with."""
    return functools.partial(torch.empty, dtype=dtype_of(anatomy, anatomy.denoiser or ""))


def picture_tokens(anatomy: Anatomy, shape: Shape) -> tuple[int, int]:
    """Rows and columns of a picture's tokens, each of 2x2 latent pixels."""
    height, width = latent_size(anatomy, shape)
    return height // 2, width // 2


def packed_inputs(
    anatomy: Anatomy,
    shape: Shape,
    words: int,
    added: dict[str, Any],
    widths: tuple[str, ...] = ("joint_attention_dim",),
) -> StepInputs:
    """Inputs of a step with packed latents: (pictures, tokens, 4 C), followed by what the pipeline adds.

    Args:
        words: tokens of the prompt.
        added: further arguments of the transformer.
        widths: names in its configuration of the sizes of a word.
    """
    config, empty = anatomy.config(anatomy.denoiser), empty_of(anatomy)
    rows, columns = picture_tokens(anatomy, shape)
    channels, tokens = 4 * latent_channels(anatomy), rows * columns
    extra_channels = int(config["in_channels"]) - channels
    text = empty(shape.rows, words, *(int(config[width]) for width in widths))
    return StepInputs(
        latents=empty(shape.batch, tokens, channels),
        timestep=torch.tensor(1.0),
        text=text,
        beside=empty(shape.rows, tokens, extra_channels) if extra_channels else None,
        joined=empty(shape.rows, tokens * anatomy.joined, channels) if anatomy.joined else None,
        added=added,
        held=(torch.empty_like(text),) * (anatomy.calls - 1),  # the text of the other call
    )


def predict(transformer: Any, x: Tensor, inputs: StepInputs) -> Tensor:
    """The transformer's prediction, as ``x``: (rows, tokens, 4 C), or a map (rows, C, h, w)."""
    time = inputs.timestep.expand(len(x)).to(x.dtype)
    prediction: Tensor = transformer(
        hidden_states=x, encoder_hidden_states=inputs.text, timestep=time, return_dict=False, **inputs.added
    )[0]
    return prediction


def given_by_name(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a transformer's call, by the names of its forward."""
    return dict(zip(_names(type(transformer).forward), args, strict=False)) | kwargs


@functools.lru_cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def packed_in_call(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LatentsInCall | None:
    """The packed latents in a call, and the size of the picture, from the ids of their tokens."""
    arguments = given_by_name(transformer, args, kwargs)
    latents, ids = arguments.get("hidden_states"), arguments.get("img_ids")
    if not (isinstance(latents, Tensor) and isinstance(ids, Tensor)):
        return None  # the call itself says what is missing

    def size() -> tuple[int, int]:
        rows, columns = (ids[..., 1:3].reshape(-1, 2).max(0).values + 1).int().tolist()
        return 2 * rows, 2 * columns

    return LatentsInCall(latents, len(latents), 4 * latents.shape[1], size)
