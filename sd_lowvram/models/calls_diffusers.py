"""Inputs of the models in diffusers' pipelines, derived from the models' layers and configurations."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from ..patches import Answered
from .anatomy import Anatomy, layer
from .calls import CONTROL, CONTROL_STAGE, TEXT_STAGE, Shape, Stage, StepInputs
from .interfaces import DiffusersUNet
from .latents import dtype_of, latent_channels, latent_size

ADAPTER = "adapter"
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
    features = tuple(_features(anatomy, rows, shape, empty))
    return StepInputs(
        latents=empty(shape.batch, channels, *size),
        timestep=torch.tensor(1),
        text=empty(rows, text_length(anatomy), _text_width(anatomy)),
        beside=empty(rows, extra_channels, *size) if extra_channels else None,
        labels=_labels(unet, config, rows, empty),
        guidance=None if distilled is None else empty(rows, int(distilled)),
        added=_added_conditions(anatomy, rows, empty),
        residuals=_residuals(unet, rows, size, empty) if CONTROL in anatomy.components else (),
        features=features,
        held=(*_control_images(anatomy, shape), *map(torch.empty_like, features)),
    )


def predict(unet: DiffusersUNet, x: Tensor, inputs: StepInputs) -> Tensor:
    """The UNet's prediction (rows, C, h, w)."""
    extra: dict[str, Any] = {}
    if inputs.labels is not None:
        extra["class_labels"] = inputs.labels
    if inputs.guidance is not None:
        extra["timestep_cond"] = inputs.guidance
    if inputs.added:
        extra["added_cond_kwargs"] = inputs.added
    if inputs.residuals:
        *extra["down_block_additional_residuals"], extra["mid_block_additional_residual"] = inputs.residuals
    if inputs.features:
        extra["down_intrablock_additional_residuals"] = list(inputs.features)
    prediction: Tensor = unet(x, inputs.timestep, encoder_hidden_states=inputs.text, return_dict=False, **extra)[0]
    return prediction


def conditions(unet: Any) -> object:
    """The projections of IP-Adapters: new objects whenever an adapter is loaded or unloaded."""
    return getattr(unet, "encoder_hid_proj", None)


def helper_stages(anatomy: Anatomy, shape: Shape) -> list[Stage]:
    """The stages of the models around UNet and autoencoder."""
    stages = []
    for name, component in anatomy.components.items():
        if name.startswith("text_encoder"):
            stages.append(text_stage(name, component, text_length(anatomy, name)))
        elif name in _SEEING:
            stages.append(Stage(name, name, _SEEING[name], functools.partial(_picture_stage, anatomy, name, shape)))
    if ADAPTER in anatomy.components:
        stages.append(Stage("adapter", ADAPTER, _adapter_residuals, functools.partial(_adapter_inputs, anatomy, shape)))
    if CONTROL in anatomy.components:
        inputs = functools.partial(_control_inputs, anatomy, shape)
        run = _control_residuals if anatomy.denoiser is None else _joined_residuals
        stages.append(Stage(CONTROL_STAGE, CONTROL, run, inputs, repeats=True))
    return stages


def _picture_stage(anatomy: Anatomy, name: str, shape: Shape) -> tuple[Any, ...]:
    """A model that looks at pictures, what it looks at, and the pictures that the pipeline holds meanwhile."""
    dtype, config = dtype_of(anatomy, name), anatomy.config(name)
    side = int(getattr(config.get("vision_config"), "image_size", 0) or config.get("image_size") or _SIDES[name])
    pictures = torch.empty(shape.batch, 3, shape.height, shape.width, dtype=dtype)
    count = shape.batch if name == "safety_checker" else 1
    return anatomy.components[name], torch.empty(count, 3, side, side, dtype=dtype), pictures


_SIDES = {"image_encoder": 224, "depth_estimator": 384, "safety_checker": 224}
"""Pixels of the squares that they look at, where their configurations do not say."""


def _check_safety(checker: Any, pixels: Tensor, pictures: Tensor) -> Any:
    with Answered(_UNREAD):
        return checker(pixels, list(pictures))


_SEEING: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "image_encoder": lambda encoder, pixels, pictures: encoder(pixels, output_hidden_states=True),
    "depth_estimator": lambda estimator, pixels, pictures: estimator(pixels),
    "safety_checker": _check_safety,
}


_UNREAD = {Tensor.item: lambda _: 0.0, Tensor.numpy: lambda tensor: [[0.0] * tensor.shape[1]] * tensor.shape[0]}
"""Replacements that return zero for values that Python reads from tensors; a trace has no values."""


def text_length(anatomy: Anatomy, name: str | None = None) -> int:
    """Tokens of a prompt: 77 for CLIP."""
    name = name or next((candidate for candidate in anatomy.components if candidate.startswith("text_encoder")), None)
    return int(anatomy.config(name).get("max_position_embeddings") or _TOKENS)


def text_stage(name: str, encoder: nn.Module, length: int, hidden: bool = True) -> Stage:
    """The stage of a text encoder, which reads ``length`` tokens.

    Args:
        hidden: whether it keeps what each of its layers makes.
    """

    def run(encoder: nn.Module, tokens: Tensor) -> Any:
        return encoder(tokens, output_hidden_states=hidden)

    return Stage(TEXT_STAGE, name, run, lambda: (encoder, torch.zeros(1, length, dtype=torch.long)))


def _config(anatomy: Anatomy) -> Mapping[str, Any]:
    """The UNet's configuration; without a UNet that of a ControlNet, a copy of the UNet's first half."""
    if anatomy.denoiser is None and CONTROL in anatomy.components:
        config: Mapping[str, Any] = _several(anatomy.components[CONTROL], "nets")[0].config
        return config
    return anatomy.config(anatomy.denoiser)


def _text_width(anatomy: Anatomy) -> int:
    """Width of the UNet's text: that of its attentions, unless it projects the text itself."""
    config, own = _config(anatomy), getattr(anatomy.denoiser_module, "text_encoder_hid_proj", None)
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
    config = _config(anatomy)
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


def _residuals(unet: DiffusersUNet, rows: int, size: tuple[int, int], empty: _Empty) -> tuple[Tensor, ...]:
    """Maps of the sizes of the skip connections, and of the middle, in one buffer."""
    height, width = size
    shapes = [(layer(unet.conv_in).out_channels, height, width)]
    for block in unet.down_blocks:
        shapes += [(resnet.out_channels, height, width) for resnet in block.resnets]
        if block.downsamplers:
            height, width = -(-height // 2), -(-width // 2)
            shapes.append((shapes[-1][0], height, width))
    shapes.append(shapes[-1])
    sizes = [rows * math.prod(shape) for shape in shapes]
    parts = empty(sum(sizes)).split(sizes)
    return tuple(part.view(rows, *shape) for part, shape in zip(parts, shapes, strict=True))


def _control_inputs(anatomy: Anatomy, shape: Shape) -> tuple[Any, ...]:
    """Inputs of the ControlNets, with the residuals of the step before: pipelines hold them until the next ones."""
    empty = functools.partial(torch.empty, dtype=dtype_of(anatomy, CONTROL))
    channels = layer(_several(anatomy.components[CONTROL], "nets")[0].conv_in).in_channels
    latents = empty(shape.rows, channels, *latent_size(anatomy, shape))
    text = empty(shape.rows, text_length(anatomy), _text_width(anatomy))
    added = _added_conditions(anatomy, shape.rows, empty)
    added.pop("image_embeds", None)
    unet: Any = anatomy.denoiser_module or _several(anatomy.components[CONTROL], "nets")[0]
    before = _residuals(unet, shape.rows, latent_size(anatomy, shape), empty)
    return anatomy.components[CONTROL], latents, torch.tensor(1), text, _control_images(anatomy, shape), added, before


def _several(component: Any, name: str) -> list[Any]:
    """The parts under ``name`` of a component that holds several of its kind; else the component itself."""
    return list(getattr(component, name, [component]))


def _control_images(anatomy: Anatomy, shape: Shape) -> list[Tensor]:
    """The pictures that ControlNets are given, one for each."""
    if CONTROL not in anatomy.components:
        return []
    dtype, size = dtype_of(anatomy, CONTROL), (shape.height, shape.width)
    nets = _several(anatomy.components[CONTROL], "nets")
    channels = [int(net.config.get("conditioning_channels", 3)) for net in nets]
    return [torch.empty(shape.rows, count, *size, dtype=dtype) for count in channels]


def _control_residuals(
    control: Any,
    latents: Tensor,
    timestep: Tensor,
    text: Tensor,
    images: list[Tensor],
    added: dict[str, Any],
    _before: tuple[Tensor, ...],
) -> list[Tensor]:
    """The residuals of a ControlNet, or of several added up, as pipelines do before the UNet in each step."""
    total: list[Tensor] = []
    for net, image in zip(_several(control, "nets"), images, strict=True):
        extra: dict[str, Any] = {"added_cond_kwargs": added} if added else {}
        kinds = net.config.get("num_control_type")
        if kinds is None:
            extra["controlnet_cond"] = image
        else:  # one net for several kinds of pictures
            extra |= {"controlnet_cond": [image], "control_type_idx": [0]}
            extra["control_type"] = torch.zeros(len(latents), kinds, dtype=latents.dtype)
        down, mid = net(latents, timestep, text, return_dict=False, **extra)
        total = (
            [residual + other for residual, other in zip(total, [*down, mid], strict=True)] if total else [*down, mid]
        )
    return total


def _joined_residuals(control: Any, *inputs: Any) -> tuple[Tensor, ...]:
    """The same, copied into the buffer of the last input, which has those of the step before."""
    joined: tuple[Tensor, ...] = inputs[-1]
    for place, residual in zip(joined, _control_residuals(control, *inputs), strict=True):
        place.copy_(residual)
    return joined


def _adapter_inputs(anatomy: Anatomy, shape: Shape) -> tuple[Any, ...]:
    component, dtype = anatomy.components[ADAPTER], dtype_of(anatomy, ADAPTER)
    channels = [int(adapter.config["in_channels"]) for adapter in _several(component, "adapters")]
    return component, [torch.empty(shape.batch, count, shape.height, shape.width, dtype=dtype) for count in channels]


def _adapter_residuals(adapter: Any, images: list[Tensor]) -> Any:
    return adapter(images if hasattr(adapter, "adapters") else images[0])


def _features(anatomy: Anatomy, rows: int, shape: Shape, empty: _Empty) -> Iterator[Tensor]:
    """Maps of the sizes that T2I-Adapters make, one for each of the UNet's levels."""
    if ADAPTER not in anatomy.components:
        return
    adapter = _several(anatomy.components[ADAPTER], "adapters")[0]
    height, width = shape.height // adapter.downscale_factor, shape.width // adapter.downscale_factor
    channels = adapter.config["channels"]
    for number, block in enumerate(adapter.adapter.body):
        if block.downsample is not None:
            height, width = -(-height // 2), -(-width // 2)
        yield empty(rows, int(channels[min(number, len(channels) - 1)]), height, width)  # a light one has a block more
