"""Placements: where the weights of a stage are while it runs. Each returns bytes; :mod:`.stage_seconds` makes time.

:func:`placement_of` chooses one for each stage, by what knobs declare (:class:`~sd_lowvram.knob.Act`) and by the
target. To add one, write a function from a :class:`Case` to a :class:`Placed`, and name it there. A new cost in time
is a count: a field of :class:`Placed`, which the cost model copies to a field of :class:`~.stage_seconds.Counts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..hooks.parking.offload import policy_of, step_groups
from ..knob import Act
from ..models.anatomy import Anatomy
from ..models.calls import CONTROL, Stage
from ..settings import Settings
from ..tracing.tracer import Figures
from .stage_costs import StageCosts, Step, Weights


@dataclass(frozen=True)
class Case:
    """A stage with its settings, as a placement reads them.

    Attributes:
        acts: behaviours of the settings.
        traced: the settings as the stage is traced.
        weights: bytes of every component's weights.
        own: weights of the stage's component as it runs: wider than in ``weights`` if it overflows.
        overflows: True if the component's type is too narrow for it, so that its pipeline widens it.
        figures: memory and work of a call with all weights on the device.
        away: the component that runs on the processor next to a GPU; None: none does.
        costs: bytes of streamed weights.
        step: function that prices a call with streamed weights.
    """

    anatomy: Anatomy
    stage: Stage
    acts: frozenset[Act]
    traced: Settings
    weights: Mapping[str, int]
    own: Weights
    overflows: bool
    figures: Figures
    away: str | None
    costs: StageCosts
    step: Callable[[], Step]

    @property
    def component(self) -> str:
        """Name of the stage's component."""
        return self.stage.component

    @property
    def other_bytes(self) -> dict[str, int]:
        """Bytes of the other components that are not on the processor."""
        return {name: size for name, size in self.weights.items() if name not in (self.component, self.away)}

    @property
    def on_device(self) -> int:
        """Bytes of the component's weights while it runs: all, or those that its host leaves there."""
        return min(self.own.bytes, self.anatomy.kept.get(self.component, self.own.bytes))


@dataclass(frozen=True)
class Placed:
    """Weights of a stage under a placement.

    Attributes:
        here: bytes of the stage's own weights on the device, in addition to the activations' peak.
        buffer: bytes of the allocation for them.
        largest: bytes of the largest allocation for weights.
        beside: bytes of each other component that stays on the device.
        waiting: bytes of the weights in host memory.
        order: components in the order in which host memory is filled for copies; empty: nothing is copied.
        brought: bytes that are copied to the device before a call.
        each_call: True if they are before every call, False if once in a run.
        copied: True if host memory holds copies, made by us, of what is on the device.
        locks: True if we page-lock what waits, next to a GPU.
        step: a call with streamed weights; None: no weights are fetched during a call.
        reserved: bytes that the allocator reserves for activations next to such weights.
        widened: bytes that a change of type holds for a moment, in addition to the peak.
    """

    here: int
    buffer: int
    largest: int
    reserved: int
    beside: tuple[int, ...] = ()
    waiting: int = 0
    order: tuple[str, ...] = ()
    brought: int = 0
    each_call: bool = False
    copied: bool = False
    locks: bool = True
    step: Step | None = None
    widened: int = 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights on the device."""
        return self.here + sum(self.beside)


Placement = Callable[[Case], Placed]


def placement_of(case: Case) -> Placement:
    """Return the placement of a stage's weights."""
    if case.away == case.component:
        return processor_only
    if case.anatomy.moved:
        return moved_by_host
    if Act.STREAMS_WEIGHTS in case.acts:
        return stream_weights
    return whole_models if Act.MOVES_MODELS in case.acts else resident


def resident(case: Case) -> Placed:
    """All weights of all components are on the device.

    A component that its pipeline widens has fp16 and fp32 copies of its weights until the last of them is widened.
    """
    size = case.on_device
    both = case.weights[case.component] if case.overflows else 0
    return Placed(
        here=size,
        buffer=size,
        largest=case.own.largest_bytes,
        reserved=case.figures.repeated_bytes,
        beside=tuple(case.other_bytes.values()),
        waiting=case.weights[case.away] if case.away else 0,
        widened=max(0, both - case.figures.activation_bytes),
    )


def whole_models(case: Case) -> Placed:
    """One component is on the device at a time; all weights wait in host memory.

    Component offload reloads per step only if a ControlNet alternates with the UNet; otherwise weights cross the bus
    once.
    """
    size = case.on_device
    return Placed(
        here=size,
        buffer=size,
        largest=size or case.own.largest_bytes,
        reserved=case.figures.repeated_bytes,
        waiting=sum(case.weights.values()),
        order=tuple(case.weights),
        brought=case.own.bytes,
        each_call=case.stage.repeats and CONTROL in case.anatomy.components,
        copied=True,
    )


def moved_by_host(case: Case) -> Placed:
    """A host moves one component after the other: there is no copy of the weights, and none is page-locked by us."""
    return dataclasses.replace(whole_models(case), largest=case.own.largest_bytes, copied=False, locks=False)


def stream_weights(case: Case) -> Placed:
    """Weights pass through a buffer on the device while their stage computes; all of them wait in host memory."""
    step = case.step() if case.stage.repeats else None
    size = step.added_bytes(case.figures.activation_bytes) if step else _capacity(case)
    groups = step_groups(case.anatomy, case.anatomy.components)
    return Placed(
        here=size,
        buffer=step.device_bytes if step else size,
        largest=step.largest_bytes if step else size or case.own.largest_bytes,
        reserved=case.figures.reserved_bytes,
        waiting=sum(case.weights.values()),
        order=tuple(name for group in groups for name in group),
        brought=step.staying_bytes if step else case.own.bytes,
        copied=True,
        step=step,
    )


def _capacity(case: Case) -> int:
    """Bytes of weights on the device during a stage that runs once."""
    policy = policy_of(case.traced, denoises=False)
    if policy.kind != "whole" and policy.device_bytes is not None:
        return case.costs.room(case.component, case.traced)
    return case.own.room_bytes if policy.kind == "layer" else case.on_device


def processor_only(case: Case) -> Placed:
    """The stage runs on the processor next to a GPU, with its weights and maps in host memory."""
    others = case.other_bytes
    beside = () if Act.PARKS_WEIGHTS in case.acts else tuple(others.values())
    return Placed(0, 0, 0, 0, beside, sum(others.values()) - sum(beside), locks=False)
