"""Anatomies of models: the sites that hooks act on, found by duck typing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

from torch import nn

from .. import doors
from ..errors import UnsupportedModelError
from . import chroma, compvis, diffusers, flux, flux2, krea2, qwen_image, sd3, unknown, z_image
from .anatomy import Anatomy, Family, has, sites
from .latents import check_latents
from .recorded import Rehearsal

_FAMILIES: dict[str, Family] = {
    "flux": flux.FAMILY,
    "sd3": sd3.FAMILY,
    "flux2": flux2.FAMILY,  # before the one whose text encoder is the same
    "z-image": z_image.FAMILY,
    "qwen-image": qwen_image.FAMILY,
    "chroma": chroma.FAMILY,
    "krea2": krea2.FAMILY,
    "diffusers": diffusers.FAMILY,
    "compvis": compvis.FAMILY,
}


def families() -> dict[str, Family]:
    """All families by name; registered ones come first, because they are more specific."""
    doors.find()
    return doors.FAMILIES | {name: ours for name, ours in _FAMILIES.items() if name not in doors.FAMILIES}


def dissect(target: Any) -> Anatomy | None:
    """Return the anatomy of ``target``; None if it is of an unknown family.

    Args:
        target: a pipeline, a host's shell of one, or a model by itself.

    Raises:
        UnsupportedModelError: a pipeline, or a host's shell, has a part that cannot be planned.
        ConflictError: diffusers casts the weights of a part layer by layer.
        BadInputError: the autoencoder is of another model.
    """
    for family in families().values():
        components = family.components_of(target)
        if components:
            anatomy = anatomy_of_components(family, components)
            check_latents(target, anatomy)
            return dataclasses.replace(anatomy, **family.anatomy_fields(target, anatomy))
    return None


def dissect_any(target: Any) -> Anatomy | None:
    """Like :func:`dissect`; for any other pipeline or module, only the place of its weights; None without weights."""
    with contextlib.suppress(UnsupportedModelError):
        if (anatomy := dissect(target)) is not None:
            return anatomy
    components = unknown.components_of(target)
    return anatomy_of_components(unknown.family_of(target), components) if components else None


def dissect_rehearsed(target: Any, record: Rehearsal) -> Anatomy:
    """Return the anatomy of a pipeline whose own call was rehearsed, whatever its family.

    Args:
        target: the pipeline.
        record: the calls that it makes of its models.

    Raises:
        ConflictError: diffusers casts the weights of a part layer by layer.
    """
    with contextlib.suppress(UnsupportedModelError):
        if (anatomy := dissect(target)) is not None:
            return add_rehearsal(anatomy, record)
    order = [row.component for row in record.calls]
    parts = unknown.components_of(target)
    last = {name: number for number, name in enumerate(order)}
    parts = {name: parts[name] for name in sorted(parts, key=lambda name: last.get(name, -1))}
    family = dataclasses.replace(unknown.family_of(target), denoiser=record.denoiser)
    return add_rehearsal(anatomy_of_components(family, parts), record)


def add_rehearsal(anatomy: Anatomy, record: Rehearsal | None) -> Anatomy:
    """Return ``anatomy`` with the calls that its target makes; of an unknown family, with the feed-forward layers of
    all models that denoise.

    Args:
        anatomy: of the target, or of one of its components.
        record: the calls; None if they were not rehearsed.
    """
    if record is None or anatomy.family.known:
        return dataclasses.replace(anatomy, rehearsal=record)
    others = {name for group in record.steps for name in group} & anatomy.components.keys() - {anatomy.denoiser}
    more = (sites(name, anatomy.components[name], anatomy.family.is_feed_forward) for name in sorted(others))
    found = sum(more, anatomy.feed_forwards)
    return dataclasses.replace(anatomy, rehearsal=record, feed_forwards=found)


def anatomy_of_components(family: Family | str, components: dict[str, nn.Module]) -> Anatomy:
    """Return the anatomy of models without a target that holds them.

    Args:
        family: a family, or its name.
        components: models by the names that the family gives them; missing ones are not planned.
    """
    of = families()[family] if isinstance(family, str) else family
    name = of.denoiser
    denoiser = components.get(name)
    inside = functools.partial(sites, name, nn.Module() if denoiser is None else denoiser)
    return Anatomy(
        family=of,
        components=components,
        entries={name: _entries(part) for name, part in components.items()},
        denoiser=name if denoiser is not None else None,
        autoencoder=of.autoencoder if of.autoencoder in components else None,
        attentions=sum((sites(name, module, of.is_attention) for name, module in components.items()), ()),
        feed_forwards=inside(of.is_feed_forward),
        residual_blocks=inside(of.is_residual_block),
        transformer_blocks=inside(of.is_transformer_block),
        joint_blocks=inside(lambda module: of.joint(module) is not None),
        unet_path=of.unet_path(denoiser) if of.unet_path is not None and denoiser is not None else None,
        configs=of.configs(components),
    )


def _entries(part: nn.Module) -> tuple[str, ...]:
    """The methods through which a model is called: an autoencoder's are two."""
    return ("encode", "decode") if has(part, "encode", "decode") else ("forward",)
