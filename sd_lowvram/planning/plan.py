"""Plans: the result of the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..settings import Fidelity, Settings
from ..streaming.timing import StepTiming
from . import shown
from .request import Request
from .wording import Reason


@dataclass(frozen=True)
class Predicted:
    """Bytes at the peak, and the seconds of the whole run.

    Attributes:
        peak_bytes: tensors on the device, weights included.
        reserved_bytes: what torch's allocator reserves for these tensors and the libraries' workspaces, in segments.
        overhead_bytes: memory of the driver's context, in addition.
        weights_bytes, activation_bytes: on the device in the stage with the peak.
        host_bytes: weights and maps that wait in host memory.
        largest_bytes: the largest single allocation.
        seconds: text, all steps, decoding, and moving the weights.
        stage: the stage with the peak.
        locked_bytes: the part of ``host_bytes`` that is page-locked for copies to and from a GPU.
        kept_bytes: what torch's allocator reserves at most if a larger budget leaves room for segments that it could
            free; not more than ``reserved_bytes`` where it is 0.
    """

    peak_bytes: int
    reserved_bytes: int
    overhead_bytes: int
    weights_bytes: int
    activation_bytes: int
    host_bytes: int
    largest_bytes: int
    seconds: float
    stage: str
    locked_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class StagePlan:
    """A stage of a plan: its bytes and its time (all denoising steps together).

    Attributes:
        reserved_bytes: what torch's allocator reserves for these tensors and the libraries' workspaces, in segments.
        held_bytes: bytes of device and host at one moment, which is what the allocator of a CPU counts.
        why: the reason why the stage is not faster.
        parked_bytes: the part of ``host_bytes`` that is maps. The rest is weights, which use as much of the budget as
            is useful.
        locked_bytes: the page-locked part of ``host_bytes``.
        unlocked_bytes: weights that are not page-locked, in memory or in the file, and are read when they are copied.
        host_seconds: seconds in which the program launches operators, layers and fetches in the calls of the stage. On
            a GPU the calls take at least the longer of this and ``device_seconds``, on a CPU both together.
        device_seconds: seconds in which the device computes in these calls, or copies weights in them if that is
            longer. Both are 0 if the stage runs on the processor next to a GPU.
        slowdown: time of a step with its weights streamed, relative to all weights on the device.
        disk_bytes: weights that are read from disk in every step, because they are in no memory.
        name: "text", "control", "denoise", "decode" or "encode".
        component: name of the component that runs.
        peak_bytes: tensors on the device, weights included.
        weights_bytes, activation_bytes: the parts of ``peak_bytes``.
        host_bytes: weights and maps that wait in host memory.
        largest_bytes: the largest single allocation.
        seconds: of all calls of the stage.
        choice: knobs that were chosen for the stage.
        least_host_bytes: host memory that would be enough.
        disk_wait: the seconds that a step waits for these reads.
        at_first_call: True if the stage is planned when it is called first; until then only weights are counted.
        segment_bytes: one segment for all tensors over 1 MiB that are made in a step; 0 if several need less.
        cached_bytes: unused segments that the allocator keeps in addition where the budget leaves room for them.
    """

    name: str
    component: str
    peak_bytes: int
    reserved_bytes: int
    weights_bytes: int
    activation_bytes: int
    host_bytes: int
    held_bytes: int
    largest_bytes: int
    seconds: float
    choice: dict[str, Any]
    why: str = ""
    parked_bytes: int = 0
    least_host_bytes: int = 0
    locked_bytes: int = 0
    unlocked_bytes: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    slowdown: float = 1.0
    disk_bytes: int = 0
    disk_wait: float = 0.0
    at_first_call: bool = False
    segment_bytes: int = 0
    cached_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for each figure of a stage that is planned at its first call."""
        plain = dataclasses.asdict(self)
        if self.at_first_call:
            figures = (name for name, value in plain.items() if type(value) in (int, float))
            plain |= dict.fromkeys(figures)
        return plain


def most_kept(stages: Iterable[StagePlan]) -> int:
    """Return the most bytes that torch's allocator reserves in one of ``stages`` if it frees no segment meanwhile."""
    return max(stage.reserved_bytes + stage.cached_bytes for stage in stages)


@dataclass(frozen=True)
class Candidate:
    """Settings with what they need: a run, or the stages that share an option.

    Attributes:
        base: the knobs that all stages share, with the placement of the weights.
        settings: all decided knobs.
        stages: bytes and seconds of each stage.
        overhead_bytes: bytes that the device needs in addition to tensors.
    """

    settings: Settings
    stages: tuple[StagePlan, ...]
    overhead_bytes: int
    base: Settings

    @property
    def worst(self) -> StagePlan:
        """The stage that needs most of the device."""
        return max(self.stages, key=lambda stage: stage.reserved_bytes)

    @property
    def peak_bytes(self) -> int:
        """Largest peak of all stages."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that holds it."""
        return self.worst.reserved_bytes + self.overhead_bytes

    @property
    def weights_bytes(self) -> int:
        """Most weights on the device at a time."""
        return max(stage.weights_bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Seconds of all stages together."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Most bytes in host memory."""
        return max(stage.host_bytes for stage in self.stages)

    @property
    def least_host_bytes(self) -> int:
        """Host memory that would be enough."""
        return max(stage.least_host_bytes for stage in self.stages)

    @property
    def locked_bytes(self) -> int:
        """Most page-locked bytes."""
        return max(stage.locked_bytes for stage in self.stages)

    @property
    def unlocked_bytes(self) -> int:
        """Most bytes of waiting weights that are not page-locked."""
        return max(stage.unlocked_bytes for stage in self.stages)

    @property
    def largest_bytes(self) -> int:
        """Largest single allocation."""
        return max(stage.largest_bytes for stage in self.stages)

    @property
    def predicted(self) -> Predicted:
        """Figures of the run as a whole."""
        return Predicted(
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.worst.reserved_bytes,
            overhead_bytes=self.overhead_bytes,
            weights_bytes=self.worst.weights_bytes,
            activation_bytes=self.worst.activation_bytes,
            host_bytes=self.host_bytes,
            largest_bytes=self.largest_bytes,
            seconds=self.seconds,
            stage=self.worst.name,
            locked_bytes=self.locked_bytes,
            kept_bytes=most_kept(self.stages),
        )


@dataclass(frozen=True)
class FallbackStep:
    """A step taken after memory ran out although the plan fitted: in few words, and as a sentence."""

    name: str
    told: Reason


@dataclass(frozen=True, repr=False)
class Plan:
    """Settings with what they are predicted to need, and why they were chosen.

    Attributes:
        settings: every knob as it is attached.
        fits: True if peak plus overhead stay within the budget, and host memory within its own; None if a stage is
            planned at its first call.
        predicted: the run as a whole, of stages that are planned at their first call the weights alone; ``stages``:
            each part of it.
        minimum_peak_bytes: the least peak of all allowed settings; ``minimum_vram_bytes`` adds the overhead. It is
            traced in parts. A whole trace, which would double the time of a first plan, may find a segment or two more
            (SDXL at 1024x1024: 656 MiB for 624). BudgetError's ``needed_bytes`` are traced whole.
        minimum_ram_bytes: host memory that those smallest settings need.
        fidelity: the lowest fidelity of all chosen settings.
        reasons: sentences for people, each with its kind and values.
        next_faster: the faster candidate that exceeds the budget by the least; None: no candidate is faster.
        timing: times of a step's modules, if weights are streamed; an argument of ``attach``.
        alike: for "vram" and "ram" the smallest and the largest budget in bytes that give the same plan.
        fallback_steps: the steps that led to this plan, in order; their sentences are among the reasons.
    """

    settings: Settings
    request: Request
    fits: bool | None
    predicted: Predicted
    stages: tuple[StagePlan, ...]
    minimum_peak_bytes: int
    minimum_vram_bytes: int
    minimum_ram_bytes: int
    fidelity: Fidelity
    reasons: tuple[Reason, ...]
    next_faster: Candidate | None = None
    timing: StepTiming | None = field(default=None, repr=False)
    alike: dict[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    fallback_steps: tuple[FallbackStep, ...] = ()

    def __repr__(self) -> str:
        return f"<Plan {shown.title(self.as_dict())}: {shown.verdict(self.as_dict())}>"

    def __str__(self) -> str:
        """The table of the command line's ``plan``, in text."""
        return shown.text(self.as_dict())

    def _repr_html_(self) -> str:
        """The same with bars, for notebooks."""
        return shown.as_html(self.as_dict())

    @property
    def at_first_call(self) -> bool:
        """True if a stage is planned when it is called first, so that the run has no totals yet."""
        return any(stage.at_first_call for stage in self.stages)

    @property
    def most_reserved_bytes(self) -> int:
        """The most bytes that torch's allocator reserves within the budget, with the driver's share."""
        return shown.most_reserved_bytes(dataclasses.asdict(self.predicted), self.request.vram)

    def after(self, fallback_steps: tuple[FallbackStep, ...]) -> Plan:
        """Return this plan with ``fallback_steps`` added to its own."""
        sentences = (step.told for step in fallback_steps)
        return dataclasses.replace(
            self, fallback_steps=(*self.fallback_steps, *fallback_steps), reasons=(*self.reasons, *sentences)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are those of the command line's ``plan --json``."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del plain["timing"], plain["alike"]
        asked = dataclasses.replace(self.request, rehearsal=None)
        request = {**dataclasses.asdict(asked), "device": str(self.request.device)}
        request["guidance"] = self.request.passes * self.request.calls > 1
        del request["pace"], request["rehearsal"], request["fills"]
        unknown = _TOTALS if self.at_first_call else ()
        return plain | {
            "settings": self.settings.as_dict(),
            "request": request | {"rates": self.request.rates.name},
            "predicted": dataclasses.asdict(self.predicted),
            "stages": [stage.as_dict() for stage in self.stages],
            "at_first_call": self.at_first_call,
            "fidelity": str(self.fidelity),
            "reasons": [str(reason) for reason in self.reasons],
            "reason_values": [reason.as_dict() for reason in self.reasons],
            "fallback_steps": [{"name": step.name, "told": str(step.told)} for step in self.fallback_steps],
            "next_faster": self._next_faster(),
            **dict.fromkeys(unknown),
        }

    def _next_faster(self) -> dict[str, Any] | None:
        faster = self.next_faster
        if faster is None:
            return None
        return {
            "settings": faster.settings.as_dict(),
            "peak_bytes": faster.peak_bytes,
            "needed_bytes": faster.needed_bytes,
            "host_bytes": faster.host_bytes,
            "seconds": faster.seconds,
            "saved_seconds": self.predicted.seconds - faster.seconds,
        }


_TOTALS = ("fits", "predicted", "minimum_peak_bytes", "minimum_vram_bytes", "minimum_ram_bytes", "next_faster")
"""Values of a plan that JSON has as None while a stage waits for its first call."""
