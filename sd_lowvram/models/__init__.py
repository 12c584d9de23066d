"""What the models are made of: the sites that hooks act on, found by duck typing."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import nn

from .. import doors
from . import compvis, diffusers, flux
from .anatomy import Anatomy, Family, sites

_FAMILIES: dict[str, Family] = {"flux": flux.FAMILY, "diffusers": diffusers.FAMILY, "compvis": compvis.FAMILY}


def families() -> dict[str, Family]:
    """Every family by name; those that others registered are asked first, as they are the more special."""
    doors.find()
    return doors.FAMILIES | _FAMILIES


def dissect(target: Any) -> Anatomy | None:
    """The anatomy of ``target``, whichever family it belongs to; None when it is of none that we know.

    Raises:
        UnsupportedModelError: a pipeline, or a host's shell, with a part that cannot be planned.
        ConflictError: a part whose weights diffusers casts layer by layer.
    """
    for family in families().values():
        components = family.components_of(target)
        if components:
            anatomy = anatomy_of_components(family, components)
            return dataclasses.replace(anatomy, **family.run(target, anatomy))
    return None


def anatomy_of_components(family: Family | str, components: dict[str, nn.Module]) -> Anatomy:
    """The anatomy of models of a family, or of one known by this name, by the names that the family gives them."""
    of = families()[family] if isinstance(family, str) else family
    name = of.denoiser
    denoiser = components.get(name)
    inside = functools.partial(sites, name, nn.Module() if denoiser is None else denoiser)
    return Anatomy(
        family=of,
        components=components,
        entries={name: ("encode", "decode") if name == of.autoencoder else ("forward",) for name in components},
        denoiser=name if denoiser is not None else None,
        autoencoder=of.autoencoder if of.autoencoder in components else None,
        attentions=sum((sites(name, module, of.is_attention) for name, module in components.items()), ()),
        feed_forwards=inside(of.is_feed_forward),
        residual_blocks=inside(of.is_residual_block),
        transformer_blocks=inside(of.is_transformer_block),
        course=of.course(denoiser) if of.course is not None and denoiser is not None else None,
        configs=of.configs(components),
    )
