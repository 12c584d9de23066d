"""Any other pipeline of diffusers, or module: where its weights are, to be placed and streamed.

What it is called with nobody has said: its own call is rehearsed, or only the calls of an autoencoder that is known are
planned. Its feed-forward layers are found by what they are made of.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from ..weights import all_tensors
from . import diffusers, support
from .anatomy import Family, layer

_DENOISERS = ("transformer", "unet", "prior", "decoder")
"""Names of the model that runs once a step, in pipelines."""

_ALONE = "model"


def components_of(target: Any) -> dict[str, nn.Module]:
    """Every model of a pipeline, or a module by itself, that has weights."""
    parts = {_ALONE: target} if isinstance(target, nn.Module) else getattr(target, "components", None)
    named = parts.items() if isinstance(parts, dict) else ()
    components = {name: part for name, part in named if isinstance(part, nn.Module) and all_tensors(part)}
    support.check_casting(components)
    return components


def family_of(target: Any) -> Family:
    """The family of one target."""
    parts = components_of(target)
    denoiser = next((name for name in (*_DENOISERS, _ALONE) if name in parts), "")
    is_known = diffusers.is_autoencoder(parts.get("vae"))
    return dataclasses.replace(FAMILY, denoiser=denoiser, autoencoder="vae" if is_known else "")


_FEED_FORWARDS = ("FeedForward", "FeedForwardSwiGLU", "MLP", "Mlp", "FFN")
"""Ends of the names of classes that are feed-forward layers, in transformers of diffusers."""

_WIDE = 16_384
"""Features from which a norm of tokens, which makes copies in float32, holds more than the layers behind it."""


def is_feed_forward(module: nn.Module) -> bool:
    """True for a layer that computes each token by itself, and holds several times what it returns: a feed-forward
    made of linear layers, or a norm of a wide text."""
    name = type(layer(module)).__name__
    if name.endswith("Norm"):
        weight = getattr(module, "weight", None)
        return isinstance(weight, Tensor) and weight.ndim == 1 and len(weight) >= _WIDE
    layers = [part for part in module.modules() if part._parameters]
    return name.endswith(_FEED_FORWARDS) and len(layers) > 1 and all(isinstance(part, nn.Linear) for part in layers)


FAMILY = Family(
    components_of=components_of,
    known=False,
    latent_multiple=2,
    step_inputs=None,
    predict=None,
    unchecked_components_of=lambda target: {} if isinstance(target, nn.Module) else components_of(target),
    entry_methods=("check_inputs",),
    latents_in_call=lambda denoiser, args, kwargs: None,
    decode=diffusers.decode,
    encode=diffusers.encode,
    is_feed_forward=is_feed_forward,
)
