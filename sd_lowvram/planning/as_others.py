"""A run by a named policy: its request, and diffusers' own calls where the policy is one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..devices.performance import profile
from ..models.anatomy import Anatomy
from ..policies import OURS, WHOLE, Pace, policy
from ..session import attach
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
    if pace not in (OURS, WHOLE):
        rates = dataclasses.replace(
            rates,
            launch_seconds=pace.launches * rates.launch_seconds,
            half_flops=rates.half_flops / pace.arithmetic,
            source=f"{rates.source}; {_source(name, pace)}",
        )
    options |= {"rates": rates, "device": "cuda"}
    if options.get("vram") is None:
        options |= {"vram": rates.vram_bytes, "fills": False}
    return request_for(anatomy, **options)


def _source(name: str | None, pace: Pace) -> str:
    """The origin of a program's pace, for people."""
    if pace.layer:
        return f"of {name} each layer takes {pace.layer:g} launches, by a step of SD1.5 that was measured on an H100"
    longer = f"launches {pace.launches:g} and operations {pace.arithmetic:.2g} times as long"
    fitted = "fitted too" if pace.fitted else "fitted to three forks; no time of this program was used"
    return f"of {name}'s program {longer}, {fitted}"


def _offload_groups(pipe: Any, device: torch.device) -> None:
    pipe.enable_group_offload(
        onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=True
    )


CALLS: dict[str, Callable[[Any, torch.device], None]] = {
    "diffusers-model-offload": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "diffusers-sequential": lambda pipe, device: pipe.enable_sequential_cpu_offload(device=device),
    "diffusers-group": _offload_groups,
}
"""diffusers' own offloading by the policy's name, as its documentation calls it. The pipeline stays changed."""


def attach_own(pipe: Any, name: str, plan: Plan) -> None:
    """Turn on diffusers' own offloading of the policy ``name``; ``plan`` is its prediction."""
    CALLS[name](pipe, plan.request.device)
    attach(pipe, Settings(), plan.request.device).plan = plan
