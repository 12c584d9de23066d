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
from ..errors import BudgetError
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..units import format_size
from .plan import Plan
from .request import Request

_calls = threading.local()


def fallback(anatomy: Anatomy, go_leaner: Callable[[str], object]) -> Iterator[Patch]:
    """Where a component runs out of memory, have ``go_leaner``, which is given its name, attach a leaner plan, and call
    the component once more.

    An exception of ``go_leaner`` reaches the caller instead.
    """
    for name, component in anatomy.components.items():
        for entry in anatomy.entries[name]:
            yield wrap(component, entry, functools.partial(_called, component, entry, name, go_leaner), "fallback")


def _called(
    component: nn.Module,
    entry: str,
    name: str,
    go_leaner: Callable[[str], object],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
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
    go_leaner(name)  # outside of `except`: the frames that failed, and the tensors in them, are gone
    return getattr(component, entry)(*args, **kwargs)


def ran_out(error: BaseException) -> bool:
    """Whether ``error`` tells of a device that is full: torch's own error, or a library's."""
    told = str(error)
    by_words = isinstance(error, RuntimeError) and ("out of memory" in told or "ALLOC_FAILED" in told)
    return by_words or isinstance(error, torch.cuda.OutOfMemoryError)


def leaner(short: Plan, where: str, make: Callable[[Request], Plan]) -> tuple[Plan, str]:
    """What ``make`` plans for less than ``short``, with which ``where`` ran out of memory; and a sentence about it.

    Raises:
        BudgetError: nothing leaner fits.
    """
    told = f"{where} ran out of memory on {short.request.device} with a plan of {format_size(_needed(short))}"
    try:
        plan = make(_less(short))
    except BudgetError as error:
        raise BudgetError(
            f"{told}, and nothing leaner fits: {error}",
            needed_bytes=error.needed_bytes,
            stage=error.stage,
            limit=error.limit,
            by_size=error.by_size,
        ) from None
    return plan, f"{told}: it goes on with one of {format_size(_needed(plan))}"


def _less(plan: Plan) -> Request:
    """The request for less than ``plan`` needs, and for no more than there is when what was cached is given up."""
    device, vram = plan.request.device, _needed(plan) - 1
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        there = free_vram(device) + torch.cuda.memory_allocated(device) + plan.predicted.overhead_bytes
        vram = min(vram, there)
    return dataclasses.replace(plan.request, vram=max(1, vram))


def _needed(plan: Plan) -> int:
    """What ``plan`` asks of the device."""
    return plan.predicted.reserved_bytes + plan.predicted.overhead_bytes
