"""A pipeline run by a named policy, whether it is knobs of ours, diffusers' own calls, or a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..policies.named import check_policy, policy
from ..policies.offloading import CALLS
from ..session import attach, attached
from ..settings import Settings
from .plan import Plan

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
    if chosen.planned:
        made = plan()
        return lambda: _within(pipe, device, made.settings, made.timing)
    return lambda: _within(pipe, device, Settings.policy(name))


@contextlib.contextmanager
def _within(pipe: Any, device: torch.device, settings: Settings, timing: Any = None) -> Iterator[Any]:
    with attached(pipe, settings, device=device, timing=timing):
        yield pipe


def attach_own(pipe: Any, name: str, plan: Plan) -> None:
    """Turn on diffusers' own offloading of the policy ``name``, with ``plan`` as what was foretold of it."""
    CALLS[name](pipe, plan.request.device)
    attach(pipe, Settings(), plan.request.device).plan = plan
