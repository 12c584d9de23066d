"""Inference mode: no autograd bookkeeping, not even the version counters that ``no_grad`` keeps.

Source: diffusers' memory and speed guide. Fidelity: ``bitwise``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings


def inference_mode(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run every component under ``torch.inference_mode``."""
    for name, component in anatomy.components.items():
        yield from (wrap(component, entry, _run, "inference_mode") for entry in anatomy.entries[name])


def _run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        return original(*args, **kwargs)
