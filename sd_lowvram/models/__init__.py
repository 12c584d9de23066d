"""What the models are made of: the sites that hooks act on, found by duck typing."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from .. import doors
from . import compvis, diffusers
from .anatomy import Anatomy, sites

_FAMILIES = {"diffusers": diffusers, "compvis": compvis}


def families() -> dict[str, Any]:
    """Every family by name; those that others registered are asked first, as they are the more special."""
    doors.find()
    return doors.FAMILIES | _FAMILIES


def dissect(target: Any) -> Anatomy | None:
    """The anatomy of ``target``, whichever family it belongs to; None when it is of none that we know.

    Raises:
        UnsupportedModelError: a pipeline, or a host's shell, with a part that cannot be planned.
        ConflictError: a part whose weights diffusers casts layer by layer.
    """
    for name, family in families().items():
        components = family.components_of(target)
        if components:
            anatomy = anatomy_of_components(name, components)
            return dataclasses.replace(anatomy, **family.VERBS.run(target, anatomy))
    return None


def parts_of(family: str, target: Any) -> dict[str, nn.Module]:
    """The models that ``target`` has now, by name; quick, as nothing is asked of them."""
    parts: dict[str, nn.Module] = families()[family].parts_of(target)
    return parts


def begins(family: str, target: Any) -> list[str]:
    """The methods of ``target`` that a run goes through before it calls a model."""
    return [name for name in families()[family].BEGINS if hasattr(target, name)]


def anatomy_of_components(family: str, components: dict[str, nn.Module]) -> Anatomy:
    """The anatomy of models of a known family, by name: "unet" is the denoiser, "vae" the autoencoder."""
    of = families()[family]
    unet = components.get("unet", nn.Module())
    return Anatomy(
        family=family,
        components=components,
        entries={name: ("encode", "decode") if name == "vae" else ("forward",) for name in components},
        denoiser="unet" if "unet" in components else None,
        autoencoder="vae" if "vae" in components else None,
        attentions=sum((sites(name, module, of.is_attention) for name, module in components.items()), ()),
        feed_forwards=sites("unet", unet, of.is_feed_forward),
        residual_blocks=sites("unet", unet, of.is_residual_block),
        transformer_blocks=sites("unet", unet, of.is_transformer_block),
        verbs=of.VERBS,
        course=of.course(unet) if "unet" in components else None,
        configs=of.VERBS.configs(components),
    )
