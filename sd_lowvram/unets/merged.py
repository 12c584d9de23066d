"""Merge the plans of several denoisers into one plan for a run that changes between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..planning.plan import Candidate, Plan, StagePlan


def merge_plans(plans: Sequence[Plan], waiting: Sequence[int]) -> Plan:
    """The plan of a run that goes by one of ``plans`` after the other, each with its own number of steps.

    What comes before the denoising is the first one's, what comes after the last one's, and the denoising takes the
    time of all and the most memory of any. Settings are those of the plan that needs most of the device.

    Args:
        waiting: bytes in host memory, besides, while each of them has its turn.
    """
    counted = [_add_waiting(plan, nbytes) for plan, nbytes in zip(plans, waiting, strict=True)]
    names = [stage.name for stage in plans[0].stages]
    first, last = names.index("denoise"), len(names) - names[::-1].index("denoise")
    turns = [[stage for stage in stages if stage.name == "denoise"] for stages in counted]
    denoise = [_most(alike) for alike in zip(*turns, strict=True)]
    stages = (*counted[0][:first], *denoise, *counted[-1][last:])
    worst = max(plans, key=lambda plan: plan.predicted.reserved_bytes)
    whole = Candidate(worst.settings, stages, worst.predicted.overhead_bytes, worst.settings)
    return dataclasses.replace(
        worst,
        request=dataclasses.replace(worst.request, steps=sum(plan.request.steps for plan in plans)),
        fits=all(plan.fits for plan in plans),
        predicted=whole.predicted,
        stages=stages,
        minimum_peak_bytes=max(plan.minimum_peak_bytes for plan in plans),
        minimum_vram_bytes=max(plan.minimum_vram_bytes for plan in plans),
        minimum_ram_bytes=max(plan.minimum_ram_bytes + more for plan, more in zip(plans, waiting, strict=True)),
        fidelity=max(plan.fidelity for plan in plans),
        next_faster=None if len(plans) > 1 else worst.next_faster,
        timing=None if len(plans) > 1 else worst.timing,
    )


def _add_waiting(plan: Plan, nbytes: int) -> list[StagePlan]:
    return [
        dataclasses.replace(
            stage,
            host_bytes=stage.host_bytes + nbytes,
            held_bytes=stage.held_bytes + nbytes,
            least_host_bytes=stage.least_host_bytes + nbytes,
        )
        for stage in plan.stages
    ]


def _most(turns: Sequence[StagePlan]) -> StagePlan:
    """A stage that goes several ways, one after the other."""
    most = {
        name: max(getattr(stage, name) for stage in turns)
        for name in ("peak_bytes", "host_bytes", "held_bytes", "largest_bytes", "parked_bytes", "least_host_bytes")
    }
    worst = max(turns, key=lambda stage: stage.reserved_bytes)
    return dataclasses.replace(worst, seconds=sum(stage.seconds for stage in turns), **most)
