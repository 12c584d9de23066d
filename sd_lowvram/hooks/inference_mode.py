"""Inference mode: no autograd bookkeeping, not even the version counters that ``no_grad`` keeps.

Source: diffusers' memory and speed guide. Fidelity: ``bitwise``. A call that autograd follows, because gradients are on
and an input (guidance by a picture's loss) or a weight requires them, keeps autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import needs_graph


def inference_mode(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run every component under ``torch.inference_mode``."""
    for name, component in anatomy.components.items():
        around = functools.partial(_run, component)
        yield from (wrap(component, entry, around, "inference_mode") for entry in anatomy.entries[name])


def _run(component: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if needs_graph(component, args, kwargs):
        return original(*args, **kwargs)
    with torch.inference_mode():
        return original(*args, **kwargs)
