"""What the models are made of: the sites that hooks act on, found by duck typing."""

from __future__ import annotations

from typing import Any

from . import diffusers
from .anatomy import Anatomy


def dissect(target: Any) -> Anatomy | None:
    """The anatomy of ``target``, whichever family it belongs to; None when it is of none that we know."""
    return diffusers.dissect(target)
