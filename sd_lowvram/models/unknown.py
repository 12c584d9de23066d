"""Any other pipeline of diffusers, or module: where its weights are, to be placed and streamed.

What it is called with nobody has said, so that its calls are not planned; those of an autoencoder that is known are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ..weights import all_tensors
from . import diffusers, support
from .anatomy import Family

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


def _calls(*arguments: Any) -> Any:
    raise NotImplementedError("nobody knows what this model is called with")


FAMILY = Family(
    components_of=components_of,
    known=False,
    step_inputs=_calls,
    predict=_calls,
    unchecked_components_of=lambda target: {} if isinstance(target, nn.Module) else components_of(target),
    entry_methods=("check_inputs",),
    latents_in_call=lambda denoiser, args, kwargs: None,
    decode=diffusers.decode,
    encode=diffusers.encode,
)
