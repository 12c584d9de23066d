"""Retry of a call that ran out of memory although its plan fitted, with settings that need less memory.

The caller of a component holds its inputs: latents, noise and text are those of the failed call. So a denoising step,
or a decode, is repeated from the same inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat.private import free_pinned
from ..devices.info import free_vram
from ..errors import BudgetError, host_ran_out, ran_out
from ..memory.limit import call_repeated
from ..memory.pinned_buffers import PINNED_BUFFERS
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from .fallback_steps import AS_BEFORE, drop_closed, ladder
from .plan import FallbackStep, Plan
from .request import Request
from .wording import Kind, Reason, shortage_text

Make = Callable[[Request, Settings], Plan]
"""Plans a request with some knobs fixed, as :func:`make_plan` does; approximate settings are not chosen, and the least
is not looked for."""

_calls = threading.local()


@dataclass(frozen=True)
class Shortage:
    """A shortage of host or device memory in the component ``where`` (a name, or words for people)."""

    where: str
    of_host: bool


def shortage(error: RuntimeError | MemoryError, where: str) -> Shortage:
    """Classify an out-of-memory error as host or device; re-raise anything else.

    Args:
        error: what a call raised.
        where: the component, by name or in words for people.

    Returns:
        The kind of memory that is short.
    """
    if not ran_out(error):
        raise error
    return Shortage(where, host_ran_out(error))


def fallback(anatomy: Anatomy, go_leaner: Callable[[Shortage], object]) -> Iterator[Patch]:
    """Yield patches of every entry: a component that runs out of memory is called again after ``go_leaner`` attached
    smaller settings.

    Args:
        anatomy: parts of the target.
        go_leaner: attaches the next plan; its exceptions are raised to the caller.
    """
    for name, component in anatomy.components.items():
        for entry in anatomy.entries[name]:
            yield wrap(
                component, entry, functools.partial(_call_with_fallback, component, entry, name, go_leaner), "fallback"
            )


def _call_with_fallback(
    component: nn.Module,
    entry: str,
    name: str,
    go_leaner: Callable[[Shortage], object],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if getattr(_calls, "under_way", False):  # a component inside another: the outer one is called again
        return original(*args, **kwargs)
    _calls.under_way = True
    try:
        return original(*args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        short = shortage(error, name)
    finally:
        _calls.under_way = False
    go_leaner(short)  # outside of `except`, which would hold the frames that failed and their tensors
    with call_repeated():
        return getattr(component, entry)(*args, **kwargs)


def leaner(plan: Plan, short: Shortage, fixed: Settings, make: Make) -> Plan:
    """Return the next plan after an out-of-memory error: the same one once, then the first step that needs less.

    The same plan is tried again only if no step was taken before and its memory is free.

    Args:
        plan: the plan that ran out of memory.
        short: the kind of memory that is short, and where.
        fixed: knobs that the user has set.
        make: plans a request with fixed settings, as :func:`.search.make_plan`.

    Raises:
        BudgetError: no plan with less memory fits.
    """
    device, needed = plan.request.device, _needed_bytes(plan, short)
    _give_up_cached(device)
    case: dict[str, Any] = {"where": short.where, "of_host": _is_host_short(plan, short)}
    case |= {"device": str(device), "needed_bytes": needed}
    if not plan.fallback_steps and _has_room(plan, short):
        return plan.after((FallbackStep(AS_BEFORE, Reason(Kind.RAN_AGAIN, **case)),))
    request = _less(plan, short)
    refused = BudgetError("the ways that are left take no less", needed_bytes=needed, stage=short.where)
    first: tuple[str, Plan] | None = None
    for name, held in ladder(plan.settings, fixed, _is_host_short(plan, short)):
        try:
            candidate = make(request, held)
        except BudgetError as error:
            refused = error
            continue
        if _needed_bytes(candidate, short) >= needed:  # in a host that moves weights, other weights are counted
            continue
        if _holds_less(candidate, plan, short):
            return _below(plan, name, candidate, case, short)
        first = first or (name, candidate)
    if first is not None:
        return _below(plan, *first, case, short)
    raise BudgetError(
        f"{shortage_text(**case)}, and nothing leaner fits: {refused}",
        needed_bytes=refused.needed_bytes,
        stage=refused.stage,
        limit=refused.limit,
        by_size=refused.by_size,
    ) from None


def _below(plan: Plan, name: str, candidate: Plan, case: dict[str, Any], short: Shortage) -> Plan:
    """``candidate`` on the step ``name`` below ``plan``; ``case``: where memory ran out."""
    reason = Reason(Kind.RAN_LEANER, **case, leaner_bytes=_needed_bytes(candidate, short), step=name)
    candidate = dataclasses.replace(
        candidate,
        settings=drop_closed(candidate.settings, plan.settings),
        minimum_peak_bytes=min(plan.minimum_peak_bytes, candidate.minimum_peak_bytes),
        minimum_vram_bytes=min(plan.minimum_vram_bytes, candidate.minimum_vram_bytes),
        minimum_ram_bytes=min(plan.minimum_ram_bytes, candidate.minimum_ram_bytes),
    )
    return candidate.after((*plan.fallback_steps, FallbackStep(name, reason)))


def _is_host_short(plan: Plan, short: Shortage) -> bool:
    """True if host bytes must shrink; if a CPU computes, device bytes must."""
    return short.of_host and plan.request.device.type != "cpu"


def _give_up_cached(device: torch.device) -> None:
    gc.collect()
    PINNED_BUFFERS.give_up()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_pinned()  # pinned memory that torch caches


def _device_bytes(plan: Plan) -> int | float:
    """Bytes of the device for everything that runs by ``plan``, as far as they are known."""
    device = plan.request.device
    if device.type != "cuda":
        return math.inf
    return free_vram(device) + torch.cuda.memory_allocated(device) + plan.predicted.overhead_bytes


def _has_room(plan: Plan, short: Shortage) -> bool:
    return _is_host_short(plan, short) or _device_bytes(plan) >= _needed_bytes(plan, short)


def _less(plan: Plan, short: Shortage) -> Request:
    """The request for less than ``plan`` takes where memory ran out, and for no more than there is.

    Its budget is not filled: a plan just below the one that failed may fail too.
    """
    if _is_host_short(plan, short):
        least = max(stage.least_host_bytes for stage in plan.stages)
        ram = least if least < plan.predicted.host_bytes else least - 1  # first without the RAM that only saves time
        return dataclasses.replace(plan.request, ram=max(1, ram), fills=False)
    vram = min(_needed_bytes(plan, short) - 1, _device_bytes(plan))
    return dataclasses.replace(plan.request, vram=max(1, int(vram)), fills=False)


def _needed_bytes(plan: Plan, short: Shortage) -> int:
    """Bytes that ``plan`` needs of the memory that is short, in the stages of the component that ran out."""
    if _is_host_short(plan, short):
        return plan.predicted.host_bytes
    below = max(stage.reserved_bytes for stage in plan.stages) - max(_stage_values(plan, short, "reserved_bytes"))
    return plan.predicted.reserved_bytes + plan.predicted.overhead_bytes - below


def _holds_less(candidate: Plan, plan: Plan, short: Shortage) -> bool:
    """Return True if ``candidate`` needs less than ``plan``.

    On a CPU, host and device are one memory: prefer plans that lower the sum."""
    if plan.request.device.type != "cpu":
        return True
    return max(_stage_values(candidate, short, "held_bytes")) < max(_stage_values(plan, short, "held_bytes"))


def _stage_values(plan: Plan, short: Shortage, name: str) -> list[int]:
    """The attribute ``name`` of the stages of the component that ran out of memory; of all where it is none."""
    own = [stage for stage in plan.stages if stage.component == short.where]
    return [getattr(stage, name) for stage in own or plan.stages]
