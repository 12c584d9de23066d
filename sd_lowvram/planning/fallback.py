"""A call that runs out of the device's memory all the same is made again with a leaner plan.

Whoever calls a component holds what it is called with: latents, noise and text are those of the call that failed, and
so a denoising step is computed anew from them, and a decode from the same latents.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..devices.info import free_vram
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from .plan import Plan
from .request import Request

Leaner = Callable[[str], object]
"""Attach a leaner plan; the argument names the component that ran out of memory."""

_calls = threading.local()


def fallback(anatomy: Anatomy, leaner: Leaner) -> Iterator[Patch]:
    """Where a component runs out of memory, call ``leaner`` and then the component once more, as it is attached then.

    An exception of ``leaner`` reaches the caller instead.
    """
    for name, component in anatomy.components.items():
        for entry in anatomy.entries[name]:
            yield wrap(component, entry, functools.partial(_called, component, entry, name, leaner), "fallback")


def _called(
    component: nn.Module, entry: str, name: str, leaner: Leaner, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if getattr(_calls, "under_way", False):  # a component inside another: the outer one is called again
        return original(*args, **kwargs)
    _calls.under_way = True
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        if not ran_out(error):
            raise
    finally:
        _calls.under_way = False
    leaner(name)  # outside of `except`: the frames that failed, and the tensors in them, are gone
    return getattr(component, entry)(*args, **kwargs)


def ran_out(error: BaseException) -> bool:
    """Whether ``error`` tells of a device that is full: torch's own error, or a library's."""
    told = str(error)
    by_words = isinstance(error, RuntimeError) and ("out of memory" in told or "ALLOC_FAILED" in told)
    return by_words or isinstance(error, torch.cuda.OutOfMemoryError)


def less(plan: Plan) -> Request:
    """The request of a plan that needs less than ``plan``, and no more than there is; what was cached is given up."""
    device, needed = plan.request.device, needed_bytes(plan)
    gc.collect()
    vram = needed - 1
    if device.type == "cuda":
        torch.cuda.empty_cache()
        there = free_vram(device) + torch.cuda.memory_allocated(device) + plan.predicted.overhead_bytes
        vram = min(vram, there)
    return dataclasses.replace(plan.request, vram=max(1, vram))


def needed_bytes(plan: Plan) -> int:
    """What ``plan`` asks of the device."""
    return plan.predicted.peak_bytes + plan.predicted.overhead_bytes
