"""What stages take with given settings, and the whole runs that they make up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from ..devices.overhead import Overhead
from ..devices.performance import THIS
from ..devices.this_machine import overhead_of
from ..hooks.offload import STREAMED
from ..hooks.precision import compute_dtype, converted, force_upcast
from ..models.anatomy import Anatomy
from ..settings import Settings
from ..streaming.host_weights import least_host_bytes, mapped_bytes
from ..streaming.simulator import Copies
from ..streaming.timing import Timing
from ..units import MIB
from .plan import Candidate, StagePlan
from .request import Request
from .stage_costs import Cost, Costs, Step, Weights
from .stages import CONTROL, Stage

_ASSUMED_CPU_FLOPS = 1e11
"""Operations a second of a CPU that decodes beside a GPU: an assumption, as no profile tells it."""


def _overhead(request: Request) -> int:
    """Bytes that the device needs besides tensors: the machine's own, unless the plan is for another one."""
    if request.device.type != "cuda":
        return 0
    here = request.rates.name == THIS and torch.cuda.is_available()
    return (overhead_of(request.device) if here else Overhead()).total()


class Pricing:
    """What stages of one request take with given settings."""

    def __init__(self, anatomy: Anatomy, request: Request, like: Pricing | None = None) -> None:
        """
        Args:
            like: of the same model and another size, whose twin will do.
        """
        self.anatomy = anatomy
        self.request = request
        if like is not None:
            self.costs: Costs = like.costs.resized(request.shape)
        else:
            self.costs = Costs(anatomy, request.shape, request.encodes, request.device)
        self.on_gpu = request.device.type != "cpu"
        self._files: dict[str, int] = {}
        self._timings: dict[Any, Timing] = {}
        self.overhead = _overhead(request)

    def whole(self, base: Settings, chosen: Iterable[StagePlan]) -> Candidate:
        """The run in which every stage goes as ``chosen``, in the order of the run."""
        merged: dict[str, Any] = {}
        order = [(stage.name, stage.component) for stage in self.costs.stages]
        stages = sorted(chosen, key=lambda stage: order.index((stage.name, stage.component)))
        for stage in stages:
            merged |= stage.choice
        return Candidate(base.filled(**merged), tuple(stages), self.overhead)

    def confirmed(self, candidate: Candidate) -> Candidate:
        """``candidate`` with its stages traced whole, weights streamed as they will be.

        A stage that runs once and has not half the peak decides nothing, and stays as it was composed.
        """
        half = candidate.peak_bytes // 2
        stages = {(stage.name, stage.component): stage for stage in self.costs.stages}

        def confirmed(planned: StagePlan) -> StagePlan:
            return self._confirmed(stages[planned.name, planned.component], planned, candidate.settings, half)

        return dataclasses.replace(candidate, stages=tuple(map(confirmed, candidate.stages)))

    def _confirmed(self, stage: Stage, planned: StagePlan, settings: Settings, half: int) -> StagePlan:
        elsewhere = not planned.activation_bytes
        if elsewhere or (planned.peak_bytes < half and not stage.repeats):
            return planned
        traced = self.as_traced(stage, settings)
        short = self.costs(stage, self._unstreamed(traced))
        streamed = traced.offload in STREAMED and stage.repeats
        whole = self.costs(stage, traced, whole=True, timing=self.timing(stage, settings) if streamed else None)
        more = max(0, whole.activation_bytes - short.activation_bytes)
        if traced.offload is not None:
            more = max(0, whole.peak_bytes - planned.peak_bytes)
        again = self._fetched_again(stage, settings, whole.copied_bytes - short.copied_bytes) if streamed else 0.0
        return dataclasses.replace(
            planned,
            peak_bytes=planned.peak_bytes + more,
            activation_bytes=planned.activation_bytes + more,
            seconds=planned.seconds + self.request.steps * again,
        )

    def _fetched_again(self, stage: Stage, settings: Settings, copied: int) -> float:
        """Seconds for what a step fetches more than once, where strips need more weights together than there is room.

        ``copied`` bytes are of a first step: all weights, what is read ahead into the ring, and these.
        """
        step = self.step(stage, settings)
        return max(0, copied - step.streamed_bytes - step.device_bytes) / self.request.rates.copy_bandwidth

    def stage(self, base: Settings, stage: Stage, choice: dict[str, Any]) -> StagePlan:
        """One stage with ``base`` and the knobs of ``choice``."""
        settings = base.filled(**choice)
        weights = {name: self.costs.weights(name, settings).bytes for name in self.anatomy.components}
        away = self.on_gpu and settings.decoder_device == "cpu"
        if away and stage.component == self.anatomy.autoencoder:
            return self._on_cpu(settings, stage, choice, weights)
        traced = self.as_traced(stage, settings)
        cost = self.costs(stage, self._unstreamed(traced))
        own = self.costs.weights(stage.component, traced)
        streamed = settings.offload in STREAMED
        step = self.step(stage, settings) if streamed and stage.repeats else None
        here = step.device_bytes if step else self._room(settings, stage.component, own)
        others = [
            name for name in weights if name != stage.component and not (away and name == self.anatomy.autoencoder)
        ]
        resident = sum(weights[name] for name in others) if settings.offload in (None, "none") else 0
        waiting = sum(weights.values()) - resident - (own.bytes if settings.offload in (None, "none") else 0)
        masters, least, copies = self._masters(settings, max(0, waiting), cost.host_peak_bytes)
        moving = own.largest_bytes if settings.offload == "component" else here if streamed else 0
        plain = self._once(stage, settings, cost)
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=cost.activation_bytes + here + resident,
            weights_bytes=here + resident,
            activation_bytes=cost.activation_bytes,
            host_bytes=masters + cost.host_peak_bytes,
            held_bytes=sum(weights.values()) + copies + max(cost.allocated_bytes + (here if streamed else 0), moving),
            largest_bytes=max(cost.largest_bytes, here if streamed else own.largest_bytes),
            seconds=self._seconds(stage, settings, step.seconds if step else plain, own),
            choice=choice,
            slowdown=step.seconds / plain if step and plain else 1.0,
            parked_bytes=cost.host_peak_bytes,
            least_host_bytes=least + cost.host_peak_bytes,
        )

    def _masters(self, settings: Settings, waiting: int, parked: int) -> tuple[int, int, int]:
        """Host memory that ``waiting`` bytes of weights take beside ``parked`` ones of maps, need and copy to.

        What is streamed from a mapped file needs no memory of its own, and is the better for some.
        """
        if settings.offload in (None, "none", "component"):
            return waiting, waiting, 0
        mapped = sum(self._mapped(name, settings) for name in self.anatomy.components)
        least = min(waiting, least_host_bytes(waiting, min(mapped, waiting)))
        taken = min(waiting, max(least, self.request.ram - parked))
        return taken, least, taken - max(0, waiting - mapped)

    def _mapped(self, name: str, settings: Settings) -> int:
        """Bytes of a component's weights that are used as they lie in a file."""
        if converted(self.anatomy, name, settings) or settings.weight_storage is not None:
            return 0
        if name not in self._files:
            self._files[name] = mapped_bytes(self.anatomy.components[name])
        return self._files[name]

    def as_traced(self, stage: Stage, settings: Settings) -> Settings:
        """``settings`` as they act on one stage; weights that stay or move whole are added up without a trace."""
        upcast = force_upcast(self.anatomy, stage.component)
        half = compute_dtype(self.anatomy, stage.component, settings) == torch.float16
        precision = "fp32" if upcast and half else settings.precision
        streamed = settings.offload not in (None, "none", "component")
        traced = dataclasses.replace(settings, precision=precision, decoder_device=None)
        return traced if streamed else self._unstreamed(traced)

    @staticmethod
    def _unstreamed(settings: Settings) -> Settings:
        return dataclasses.replace(settings, offload=None, weights_mib=None, split_layers=None)

    def _on_cpu(self, settings: Settings, stage: Stage, choice: dict[str, Any], weights: dict[str, int]) -> StagePlan:
        """The decoder in host memory, in fp32."""
        wide = self._unstreamed(dataclasses.replace(settings, precision="fp32", decoder_device=None))
        cost = self.costs(stage, wide)
        others = sum(weights.values()) - weights[stage.component]
        resident = others if settings.offload in (None, "none") else 0
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=resident,
            weights_bytes=resident,
            activation_bytes=0,
            host_bytes=others - resident + cost.peak_bytes + cost.host_peak_bytes,
            least_host_bytes=others - resident + cost.peak_bytes + cost.host_peak_bytes,
            held_bytes=sum(weights.values()) + cost.allocated_bytes,
            largest_bytes=0,
            seconds=cost.flops / _ASSUMED_CPU_FLOPS,
            choice=choice,
        )

    def timing(self, stage: Stage, settings: Settings) -> Timing:
        """How long the modules of a stage take, weights being there."""
        resident = self._unstreamed(self.as_traced(stage, settings)).of_stage(stage.name)
        key = stage.name, stage.component, resident
        if key not in self._timings:
            size = compute_dtype(self.anatomy, stage.component, settings).itemsize
            rates = self.request.rates
            spans = self.costs(stage, resident).spans
            seconds = tuple((f"{stage.component}.{span.path}", rates.seconds(span, size)) for span in spans)
            self._timings[key] = Timing(seconds, Copies(rates.copy_bandwidth, overlap=self.on_gpu))
        return self._timings[key]

    def step(self, stage: Stage, settings: Settings) -> Step:
        """A denoising step with streamed weights."""
        return self.costs.step(stage, self.as_traced(stage, settings), self.timing(stage, settings))

    def _room(self, settings: Settings, component: str, weights: Weights) -> int:
        """Bytes on the device of a component that runs once, or of which its host keeps so many."""
        if settings.offload == "layer":
            return weights.room_bytes if settings.weights_mib is None else settings.weights_mib * MIB
        if settings.offload == "blocks" and settings.weights_mib is not None:
            return min(weights.bytes, settings.weights_mib * MIB)
        return min(weights.bytes, self.anatomy.kept.get(component, weights.bytes))

    def _once(self, stage: Stage, settings: Settings, cost: Cost) -> float:
        """Seconds of one call with its weights there: counted work over the device's rates."""
        return self.request.rates.seconds(cost, compute_dtype(self.anatomy, stage.component, settings).itemsize)

    def _seconds(self, stage: Stage, settings: Settings, once: float, weights: Weights) -> float:
        """All calls of a stage that takes ``once``, and what is copied besides."""
        seconds = (self.request.steps if stage.repeats else 1) * once
        if settings.offload == "component":  # brought and taken back: once a run, or whenever the other's turn comes
            turns = self.request.steps if stage.repeats and CONTROL in self.anatomy.components else 1
            seconds += turns * 2 * weights.bytes / self.request.rates.copy_bandwidth
        if settings.offload in STREAMED:  # what stays is brought once, and of a stage that runs once so is all else
            seconds += weights.bytes / self.request.rates.copy_bandwidth
        return seconds
