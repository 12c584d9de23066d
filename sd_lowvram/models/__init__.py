"""What the models are made of: the sites that hooks act on, found by duck typing."""

from __future__ import annotations

from typing import Any

from torch import nn

from . import compvis, diffusers
from .anatomy import Anatomy


def dissect(target: Any) -> Anatomy | None:
    """The anatomy of ``target``, whichever family it belongs to; None when it is of none that we know."""
    return diffusers.dissect(target) or compvis.dissect(target)


def anatomy_of_components(family: str, components: dict[str, nn.Module]) -> Anatomy:
    """The anatomy of models of a known family, by name."""
    return {"diffusers": diffusers.anatomy_of, "compvis": compvis.anatomy_of}[family](components)
