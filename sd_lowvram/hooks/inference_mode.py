"""Inference mode: no autograd bookkeeping, not even the version counters that ``no_grad`` keeps.

Source: diffusers' memory and speed guide. Fidelity: ``bitwise``. A call whose input requires gradients (guidance by a
picture's loss) keeps autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import first_tensor


def inference_mode(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run every component under ``torch.inference_mode``."""
    for name, component in anatomy.components.items():
        yield from (wrap(component, entry, _run, "inference_mode") for entry in anatomy.entries[name])


def _run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = first_tensor((args, kwargs))
    if torch.is_grad_enabled() and first is not None and first.requires_grad:
        return original(*args, **kwargs)
    with torch.inference_mode():
        return original(*args, **kwargs)
