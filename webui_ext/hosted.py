"""Transformers in Forge and Forge Neo: counted by the host's own classes, traced plain, and run as the host runs them.

Hooks act in their autoencoders alone. A transformer that cannot be traced is left out of the plan.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lowvram import doors
from sd_lowvram.models import compvis
from sd_lowvram.models.anatomy import HOST, Anatomy
from sd_lowvram.models.calls import Shape, StepInputs
from sd_lowvram.models.calls_compvis import POOLED, TEXT, arguments, input_widths
from sd_lowvram.models.latents import dtype_of, latent_shape

COMPONENT = "transformer"
_longest = [256]
"""Tokens of the longest text since the host began; at first the number to which it pads T5's. Others are shorter."""
_TEXT_WIDTH = 4096
"""Width of T5's text, for a transformer whose layers do not show one."""
_SIDE = 128
"""Latent pixels of the side of the pictures that these models are made for."""

_untraced: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def components_of(target: Any) -> dict[str, nn.Module]:
    """The "transformer" and "vae" of Forge's engine; empty for one with a UNet, and for all else."""
    if not hasattr(target, "forge_objects") or isinstance(target, nn.Module):
        return {}
    parts = compvis.unchecked_components_of(target)
    transformer, vae = parts.get("unet"), parts.get("vae")
    if transformer is None or transformer in _untraced or compvis.is_unet(transformer):
        return {}
    if not compvis.is_autoencoder(vae) or "context" not in arguments(type(transformer)):
        return {}
    return {COMPONENT: transformer, "vae": parts["vae"]}


def leave_out(target: Any) -> bool:
    """Plan the transformer of ``target`` no more, as it cannot be traced; False if it was not planned."""
    transformer = components_of(target).get(COMPONENT)
    if transformer is None:
        return False
    _untraced.add(transformer)
    return True


def is_longer(target: Any, *conditions: Any) -> bool:
    """True if the text of a sampling is longer than the planned one; plans count this length from then on."""
    tokens = _tokens(conditions)
    if tokens <= _longest[0] or not components_of(target):
        return False
    _longest[0] = tokens
    return True


def _tokens(condition: Any) -> int:
    """The most tokens of a text in the host's conditions: lists of schedules, whose texts may have further parts."""
    if isinstance(condition, Tensor):
        return condition.shape[-2] if condition.dim() > 1 else 0
    if isinstance(condition, Mapping):
        return _tokens(condition.get("crossattn"))
    held = (getattr(condition, name, None) for name in ("batch", "schedules", "cond"))
    inner = condition if isinstance(condition, (list, tuple)) else held
    return max(map(_tokens, filter(lambda one: one is not None, inner)), default=0)


def is_plain(anatomy: Anatomy) -> bool:
    """True if the steps are only counted."""
    return anatomy.denoiser == COMPONENT


def _step_inputs(anatomy: Anatomy, shape: Shape) -> StepInputs:
    transformer: Any = anatomy.denoiser_module
    names, dtype = arguments(type(transformer)), dtype_of(anatomy, COMPONENT)
    text, *_ = [*input_widths(transformer, TEXT), _TEXT_WIDTH]
    pooled = input_widths(transformer, POOLED)[:1] if "y" in names else []
    return StepInputs(
        latents=torch.empty(latent_shape(anatomy, shape), dtype=dtype),
        timestep=torch.empty(()),
        text=torch.empty(shape.rows, _longest[0], text, dtype=dtype),
        labels=torch.empty(shape.rows, *pooled, dtype=dtype) if pooled else None,
        guidance=torch.empty(shape.rows, dtype=dtype) if "guidance" in names else None,
    )


def _predict(transformer: Any, x: Tensor, inputs: StepInputs) -> Tensor:
    given = {"y": inputs.labels, "guidance": inputs.guidance}
    extra = {name: value for name, value in given.items() if value is not None}
    time = inputs.timestep.expand(len(x))
    predicted: Tensor = transformer(x, time, context=inputs.text, transformer_options={}, **extra)
    return predicted


def _configs(components: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    parts = {name: part for name, part in components.items() if name != COMPONENT}
    attention = getattr(sys.modules.get("backend.attention"), "attention_function", None)
    facts = {"attention": getattr(attention, "__name__", ""), "tokens": _longest[0]}
    return {**compvis.FAMILY.configs(parts), COMPONENT: {"sample_size": _SIDE}, HOST: facts}


FAMILY = dataclasses.replace(
    compvis.FAMILY,
    components_of=components_of,
    unchecked_components_of=components_of,
    denoiser=COMPONENT,
    is_attention=lambda module: compvis.is_attention(module) and compvis.attend_kind(module) == "map",
    is_feed_forward=lambda module: False,
    is_residual_block=lambda module: False,
    is_transformer_block=lambda module: False,
    unet_path=None,
    step_inputs=_step_inputs,
    predict=_predict,
    configs=_configs,
)


def register() -> Callable[[], None]:
    """Register the family, so that transformers are planned; returns a function that removes it."""
    return doors.register(families={"forge": FAMILY})
