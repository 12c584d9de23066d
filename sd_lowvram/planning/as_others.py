"""A run by a named policy, predicted or made: by our knobs, by diffusers' own calls, or by a plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..devices.performance import profile
from ..models.anatomy import Anatomy
from ..policies.named import OURS, Pace, check_policy, policy
from ..policies.offloading import CALLS
from ..session import attach, attached
from ..settings import Settings
from .plan import Plan
from .request import Request, RunOptions, request_for

if TYPE_CHECKING:
    from typing_extensions import Unpack


def request_by(name: str | None, anatomy: Anatomy, *, gpu: str | None = None, **options: Unpack[RunOptions]) -> Request:
    """The request for a run of ``anatomy``'s models by the policy ``name``, on the named card ``gpu`` or here.

    On a named GPU the predicted time is that of the program itself, with its own launch and operation times. Here the
    equivalent knobs run, and the time is theirs, unless diffusers itself moves the weights.

    Args:
        options: as for :func:`request_for`; ``vram`` of a named GPU is its whole memory by default.

    Raises:
        BadInputError: the GPU is unknown. SettingsError: the policy is unknown.
    """
    pace = OURS if name is None else policy(name).pace
    options |= {"pace": pace}
    if gpu is None:
        return request_for(anatomy, **options)
    rates = profile(gpu)
    if pace != OURS:
        rates = dataclasses.replace(
            rates,
            launch_seconds=pace.launches * rates.launch_seconds,
            half_flops=rates.half_flops / pace.arithmetic,
            source=f"{rates.source}; {_source(name, pace)}",
        )
    options |= {"rates": rates, "device": "cuda"}
    if options.get("vram") is None:
        options["vram"] = rates.vram_bytes
    return request_for(anatomy, **options)


def _source(name: str | None, pace: Pace) -> str:
    """The origin of a program's pace, for people."""
    if pace.layer is not None:
        return f"of {name} each layer takes {pace.layer:g} launches, by a step of SD1.5 that was measured on an H100"
    longer = f"launches {pace.launches:g} and operations {pace.arithmetic:.2g} times as long"
    fitted = "fitted too" if pace.fitted else "fitted to three forks; no time of this program was used"
    return f"of {name}'s program {longer}, {fitted}"


Way = Callable[[], contextlib.AbstractContextManager[Any]]
"""A context that can be entered again and again; the pipeline that it gives runs by the policy inside."""


def way_of(name: str, pipe: Any, device: torch.device, plan: Callable[[], Plan], load: Callable[[], Any]) -> Way:
    """The way to run ``pipe`` by the policy ``name``.

    Args:
        plan: makes the plan of ours; called once, where the policy has one.
        load: another pipeline of the same model, for diffusers' own ways: some of them cannot be undone.

    Raises:
        SettingsError: no policy has this name. BadInputError: it does not run on this device.
        BudgetError: from ``plan``.
    """
    chosen = policy(name)
    check_policy(name, device.type)
    if chosen.own:
        own = load()
        CALLS[name](own, device)
        return lambda: contextlib.nullcontext(own)
    if chosen.needs_plan:
        planned = plan()
        return lambda: _within(pipe, device, planned.settings, planned.timing)
    return lambda: _within(pipe, device, Settings.policy(name))


@contextlib.contextmanager
def _within(pipe: Any, device: torch.device, settings: Settings, timing: Any = None) -> Iterator[Any]:
    with attached(pipe, settings, device=device, timing=timing):
        yield pipe


def attach_own(pipe: Any, name: str, plan: Plan) -> None:
    """Turn on diffusers' own offloading of the policy ``name``; ``plan`` is its prediction."""
    CALLS[name](pipe, plan.request.device)
    attach(pipe, Settings(), plan.request.device).plan = plan
