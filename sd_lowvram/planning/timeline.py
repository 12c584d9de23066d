"""Memory over time within each stage of a plan, as a trace of the whole stage finds it; for plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..models.anatomy import Anatomy
from ..session import anatomy_of
from ..tracing import MemoryTrace
from .cost_model import Pricing
from .plan import Plan, StagePlan

_POINTS = 240


@dataclass(frozen=True)
class StageTimeline:
    """Bytes at equal distances through one stage of a plan (one denoising step, not all of them).

    Attributes:
        name, component: of the stage.
        device_bytes, host_bytes: samples over the allocations; each is the maximum of a group.
    """

    name: str
    component: str
    device_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]


def timelines_of(target: Any, plan: Plan) -> tuple[StageTimeline, ...]:
    """The timelines of the stages that ``plan`` has on the device; takes seconds, as each is traced.

    Args:
        target: what was planned, or its anatomy.
        plan: its plan.

    Returns:
        One timeline for each stage on the device.
    """
    known = isinstance(target, Anatomy)
    anatomy = target if known else anatomy_of(target, plan.settings, plan.request.rehearsal)
    pricing = Pricing(anatomy, plan.request)
    planned = {(stage.name, stage.component): stage for stage in plan.stages}
    timelines = []
    for stage in pricing.costs.stages:
        planned_stage = planned.get((stage.name, stage.component))
        if planned_stage is not None and planned_stage.activation_bytes:
            traced = pricing.costs.trace(stage, pricing.as_traced(stage, plan.settings), whole=True)
            timelines.append(_timeline(planned_stage, traced))
    return tuple(timelines)


def _timeline(stage: StagePlan, traced: MemoryTrace) -> StageTimeline:
    """The trace's timeline, plus the bytes that the rest of the run holds meanwhile."""
    added, waiting = stage.peak_bytes - traced.peak_bytes, stage.host_bytes - traced.host_peak_bytes
    events = [event for event in traced.timeline if event.operator]  # without tensors that existed before the run
    size = -(-len(events) // _POINTS)
    device = tuple(max(e.device_bytes for e in events[at : at + size]) + added for at in range(0, len(events), size))
    host = tuple(max(e.host_bytes for e in events[at : at + size]) + waiting for at in range(0, len(events), size))
    return StageTimeline(stage.name, stage.component, device, host)
