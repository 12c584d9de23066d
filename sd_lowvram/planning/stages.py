"""The stages of a run (text, denoise, decode, encode), each as a call that can be traced on a twin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models import diffusers
from ..models.anatomy import Anatomy

CONTROL = "controlnet"
"""The name under which pipelines hold their ControlNet."""

Predict = Callable[[Any, Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class Shape:
    """What is asked for: the picture in pixels, pictures at a time, and the denoiser's rows for each of them."""

    width: int
    height: int
    batch: int = 1
    passes: int = 2

    @property
    def rows(self) -> int:
        """The denoiser's batch."""
        return self.batch * self.passes


@dataclass(frozen=True)
class Stage:
    """One part of a run.

    Attributes:
        name: for people: "text", "control", "denoise", "decode" or "encode".
        component: whose weights it needs.
        run: the call, on modules and inputs of the twin.
        inputs: fake tensors for it, made when they are needed.
        repeats: whether it runs once a step rather than once a picture.
    """

    name: str
    component: str
    run: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    repeats: bool = False


def stages(anatomy: Anatomy, shape: Shape, encodes: bool) -> list[Stage]:
    """The stages of a run of ``anatomy``'s components, in order. Call them within the twin's fake mode.

    Args:
        encodes: whether the run starts from a picture (img2img, inpainting).
    """
    found = []
    for name, component in anatomy.components.items():
        if name == anatomy.denoiser:
            step = functools.partial(denoise_step, predict=anatomy.verbs.predict)
            found.append(Stage("denoise", name, step, _denoiser_inputs(anatomy, shape), repeats=True))
        elif name == anatomy.autoencoder:
            latents = (shape.batch, _latent_channels(anatomy), *latent_size(anatomy, shape))
            pixels = (shape.batch, 3, shape.height, shape.width)
            if encodes:
                found.insert(0, Stage("encode", name, anatomy.verbs.encode, _maker(anatomy, name, pixels)))
            found.append(Stage("decode", name, anatomy.verbs.decode, _maker(anatomy, name, latents)))
        elif name == CONTROL and anatomy.denoiser is not None:
            found.append(Stage("control", name, _controlled, _control_inputs(anatomy, shape), repeats=True))
        elif name.startswith("text_encoder"):
            inputs = functools.partial(_text_inputs, component, text_length(anatomy, name))
            found.insert(0, Stage("text", name, _encode_text, inputs))
    return found


def denoise_step(
    unet: nn.Module,
    latents: Tensor,
    timestep: Tensor,
    text: Tensor,
    extra: Mapping[str, Any],
    predict: Predict = diffusers.VERBS.predict,
) -> Tensor:
    """One step as pipelines make it: double the latents, predict, guide, and move on; holds what they hold."""
    doubled = torch.cat([latents] * 2) if len(text) > len(latents) else latents
    predicted = predict(unet, doubled, timestep, text, extra)
    if len(predicted) > len(latents):
        unconditional, conditional = predicted.chunk(2)
        predicted = unconditional + 7.5 * (conditional - unconditional)
    return latents - 0.1 * predicted


def _controlled(
    control: Any, latents: Tensor, timestep: Tensor, text: Tensor, image: Tensor, extra: Mapping[str, Any]
) -> list[Tensor]:
    """The residuals of a ControlNet, or of several added up, as pipelines do before the UNet in each step."""
    total: list[Tensor] = []
    for net in getattr(control, "nets", [control]):
        down, mid = net(latents, timestep, text, image, return_dict=False, **extra)
        total = [one + other for one, other in zip(total, [*down, mid], strict=True)] if total else [*down, mid]
    return total


def _encode_text(encoder: nn.Module, tokens: Tensor) -> Any:
    return encoder(tokens, output_hidden_states=True)


def text_length(anatomy: Anatomy, name: str | None = None) -> int:
    """Tokens of a prompt: 77 for CLIP."""
    name = name or next((one for one in anatomy.components if one.startswith("text_encoder")), None)
    return int(anatomy.config(name).get("max_position_embeddings") or 77) if name else 77


def _text_inputs(encoder: nn.Module, length: int) -> tuple[nn.Module, Tensor]:
    return encoder, torch.zeros(1, length, dtype=torch.long)


def _dtype(anatomy: Anatomy, name: str) -> torch.dtype:
    """The type of what a component is called with: what its host computes in, else its weights' own."""
    tensors = anatomy.components[name].parameters()
    own = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    return anatomy.computes.get(name, own)


def _maker(anatomy: Anatomy, name: str, shape: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: (anatomy.components[name], torch.empty(shape, dtype=_dtype(anatomy, name)))


def _denoiser_inputs(anatomy: Anatomy, shape: Shape) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        assert anatomy.unet is not None
        dtype = _dtype(anatomy, anatomy.denoiser or "")
        text, extra = _conditions(anatomy, shape, dtype)
        if CONTROL in anatomy.components:
            *down, mid = _controlled(*_control_inputs(anatomy, shape)())
            extra["down_block_additional_residuals"] = tuple(torch.empty_like(one, dtype=dtype) for one in down)
            extra["mid_block_additional_residual"] = torch.empty_like(mid, dtype=dtype)
        channels = int(anatomy.config(anatomy.denoiser or "").get("in_channels", 4))
        latents = torch.empty(shape.batch, channels, *latent_size(anatomy, shape), dtype=dtype)
        return anatomy.unet, latents, torch.tensor(1), text, extra

    return make


def _control_inputs(anatomy: Anatomy, shape: Shape) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        control = anatomy.components[CONTROL]
        dtype = _dtype(anatomy, CONTROL)
        text, extra = _conditions(anatomy, shape, dtype)
        latents = torch.empty(len(text), 4, *latent_size(anatomy, shape), dtype=dtype)
        image = torch.empty(len(text), 3, shape.height, shape.width, dtype=dtype)
        return control, latents, torch.tensor(1), text, image, extra

    return make


def _conditions(anatomy: Anatomy, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """The text (pictures, tokens, width) that a step is given, and what some models want besides."""
    config = anatomy.config(anatomy.denoiser or "")
    pictures = shape.rows
    width = config.get("cross_attention_dim") or 768
    width = width if isinstance(width, int) else max(width)
    extra: dict[str, Any] = {}
    if config.get("addition_embed_type") == "text_time":
        ids = 6 * int(config["addition_time_embed_dim"])
        pooled = torch.empty(pictures, int(config["projection_class_embeddings_input_dim"]) - ids, dtype=dtype)
        extra["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": torch.empty(pictures, 6, dtype=dtype)}
    if "label_channels" in config:
        extra["y"] = torch.empty(pictures, int(config["label_channels"]), dtype=dtype)
    return torch.empty(pictures, text_length(anatomy), width, dtype=dtype), extra


def scale_factor(anatomy: Anatomy) -> int:
    """Pixels that a latent pixel stands for in one direction: 8 for Stable Diffusion."""
    if anatomy.autoencoder is None:
        return 8
    return int(2 ** (len(anatomy.config(anatomy.autoencoder).get("block_out_channels", (0,) * 4)) - 1))


def latent_size(anatomy: Anatomy, shape: Shape) -> tuple[int, int]:
    """Height and width of the latents."""
    factor = scale_factor(anatomy)
    return shape.height // factor, shape.width // factor


def native_size(anatomy: Anatomy) -> int:
    """The picture's side in pixels for which the model was made."""
    if anatomy.denoiser is not None:
        sample = anatomy.config(anatomy.denoiser).get("sample_size") or 64
        return int(sample if isinstance(sample, int) else sample[0]) * scale_factor(anatomy)
    return int(anatomy.config(anatomy.autoencoder).get("sample_size") or 512) if anatomy.autoencoder else 512


def _latent_channels(anatomy: Anatomy) -> int:
    return int(anatomy.config(anatomy.autoencoder or "").get("latent_channels", 4))
