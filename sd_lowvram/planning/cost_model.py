"""What stages take with given settings, and the whole runs that they make up."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

from ..hooks.offload import STREAMED
from ..hooks.precision import Arithmetic, arithmetic
from ..memory.caching_allocator import segment
from ..models.anatomy import Anatomy
from ..models.latents import latent_channels, latent_size
from ..settings import Fidelity, Settings
from ..streaming.host_weights import least_host_bytes, mapped_bytes
from ..streaming.simulator import Copies
from ..streaming.timing import Timing
from ..units import MIB
from .options import Choice
from .plan import Candidate, StagePlan
from .request import Budget, Request
from .stage_costs import Costs, Step, Weights
from .stages import CONTROL, Stage

_ASSUMED_CPU_FLOPS = 1e11
"""Operations a second of a CPU that decodes beside a GPU: an assumption, as no profile has it."""


def _key(base: Settings, stage: Stage, choice: Choice) -> tuple[Any, ...]:
    return base, stage.name, stage.component, tuple(choice.items())


class Pricing:
    """What stages of one request take with given settings."""

    def __init__(self, anatomy: Anatomy, request: Request, like: Pricing | None = None) -> None:
        """
        Args:
            like: of the same model and another size, whose fake copy will do.
        """
        self.anatomy = anatomy
        self.request = request
        self.vram, self.ram = Budget(request.vram), Budget(request.ram)
        self.costs: Costs = Costs(anatomy, request.shape, request.encodes, request.device, like.costs if like else None)
        self.on_gpu = request.device.type != "cpu"
        self.overhead = request.overhead
        self._known: dict[tuple[Any, ...], StagePlan] = {}
        self._timings: dict[Any, Timing] = {}
        self._arithmetics: dict[tuple[str, str | None], Arithmetic] = {}

    def whole(self, base: Settings, options: Iterable[Candidate]) -> Candidate:
        """The run that ``options`` make up, its stages in their order."""
        chosen = {(one.name, one.component): one for option in options for one in option.stages}
        ordered = tuple(chosen[stage.name, stage.component] for stage in self.costs.stages)
        knobs = {name: value for stage in ordered for name, value in stage.choice.items()}
        return Candidate(base.filled(**knobs), ordered, self.overhead.total(), base)

    def confirmed(self, run: Candidate) -> Candidate:
        """``run`` with its stages traced whole, weights streamed as they will be; they are priced so from now on.

        Weights that stay, or move whole, are added up without a trace. A stage that runs once and has not half the peak
        decides nothing.
        """
        if run.settings.offload not in STREAMED:
            return run
        confirmed = list(run.stages)
        for number, (stage, planned) in enumerate(zip(self.costs.stages, run.stages, strict=True)):
            decides = stage.repeats or planned.peak_bytes >= run.peak_bytes // 2
            if decides and planned.activation_bytes:  # else it runs elsewhere
                confirmed[number] = self._confirmed(stage, planned, run.settings)
                self._known[_key(run.base, stage, planned.choice)] = confirmed[number]
        return dataclasses.replace(run, stages=tuple(confirmed))

    def _confirmed(self, stage: Stage, planned: StagePlan, settings: Settings) -> StagePlan:
        traced = self.as_traced(stage, settings)
        whole = self.costs(stage, traced, self.timing(stage, settings) if stage.repeats else None)
        more, again = max(0, whole.peak_bytes - planned.peak_bytes), 0.0
        short = self.costs(stage, self._unstreamed(traced))
        if stage.repeats:  # strips that need more weights together than there is room fetch them more than once
            step = self.step(stage, settings)
            copied = whole.copied_bytes - short.copied_bytes  # of a first step: all weights, and what is read ahead
            again = max(0, copied - step.streamed_bytes - step.device_bytes) / self.request.rates.copy_bandwidth
        return dataclasses.replace(
            planned,
            peak_bytes=planned.peak_bytes + more,
            reserved_bytes=planned.reserved_bytes + max(0, whole.reserved_bytes - short.reserved_bytes),
            activation_bytes=planned.activation_bytes + more,
            seconds=planned.seconds + self.request.steps * again,
        )

    def stage(self, settings: Settings, stage: Stage, choice: Choice, base: Settings) -> StagePlan:
        """One stage with ``settings``, which are ``base`` and the knobs of ``choice``, priced once."""
        key = _key(base, stage, choice)
        if key not in self._known:
            self._known[key] = self._priced(settings, stage, choice)
        return self._known[key]

    def priced(self, base: Settings) -> list[StagePlan]:
        """All that was priced with ``base``."""
        return [stage for (placed, *_), stage in self._known.items() if placed == base]

    def fidelity(self, settings: Settings) -> Fidelity:
        """The farthest from the model as loaded that any of the settings goes."""
        others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
        return max(*(self._arithmetic(name, settings).fidelity for name in self.anatomy.components), *others)

    def _priced(self, settings: Settings, stage: Stage, choice: Choice) -> StagePlan:
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
        elsewhere = {stage.component, self.anatomy.autoencoder if away else None}
        stays = settings.offload in (None, "none")
        beside = [size for name, size in weights.items() if name not in elsewhere] if stays else []
        resident = sum(beside)
        waiting = sum(weights.values()) - resident - (own.bytes if stays else 0)
        masters, least, copies = self._masters(settings, max(0, waiting), cost.host_peak_bytes)
        copied = 0 if stays else here  # the masters stay where they are
        widened = weights[stage.component] if stays and self._arithmetic(stage.component, settings).overflows else 0
        held = max(0, widened - cost.activation_bytes)  # of a type too narrow, until all are in the wider one
        workspace = self.overhead.more_for(cost.convolved_bytes)
        plain = self.request.rates.seconds(cost, self._arithmetic(stage.component, settings).dtype.itemsize)
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=cost.activation_bytes + here + resident + held,
            reserved_bytes=cost.reserved_bytes + workspace + held + self._beside + self._buffers(here, *beside),
            weights_bytes=here + resident,
            activation_bytes=cost.activation_bytes,
            host_bytes=masters + cost.host_peak_bytes,
            held_bytes=sum(weights.values()) + copies + copied + cost.allocated_bytes,
            largest_bytes=max(cost.largest_bytes, copied or own.largest_bytes),
            seconds=self._seconds(stage, settings, step.seconds if step else plain, own),
            choice=choice,
            slowdown=step.seconds / plain if step and plain else 1.0,
            parked_bytes=cost.host_peak_bytes,
            least_host_bytes=least + cost.host_peak_bytes,
        )

    @functools.cached_property
    def _beside(self) -> int:
        """What the device gives for what a pipeline holds beside a stage: conditions, for which a MiB is counted, and
        latents, of which its scheduler makes others in fp32: four in all."""
        pixels = math.prod(latent_size(self.anatomy, self.request.shape)) * self.request.batch
        latents = 4 * latent_channels(self.anatomy) * pixels
        return -(-(4 * latents + MIB) // segment(latents)) * segment(latents) if self.on_gpu else 0

    def _buffers(self, *sizes: int) -> int:
        """What the device gives for weights that lie in buffers of these sizes."""
        return sum(map(segment, sizes)) if self.on_gpu else sum(sizes)

    def _masters(self, settings: Settings, waiting: int, parked: int) -> tuple[int, int, int]:
        """Host memory that ``waiting`` bytes of weights take beside ``parked`` ones of maps, need and copy to.

        What is streamed from a mapped file needs no memory of its own, and is the better for some.
        """
        if settings.offload in (None, "none", "component"):
            return waiting, waiting, 0
        kept = {name: size for name, size in self._in_files.items() if not self._arithmetic(name, settings).converted}
        mapped = sum(kept.values()) if settings.weight_storage is None else 0
        least = min(waiting, least_host_bytes(waiting, min(mapped, waiting)))
        taken = min(waiting, max(least, self.request.ram - parked))
        for more in (0, 1):  # what is taken hangs on the budget itself, or not
            self.ram.holds(taken + parked + more)
        return taken, least, taken - max(0, waiting - mapped)

    @functools.cached_property
    def _in_files(self) -> dict[str, int]:
        """Bytes of each component's weights that are used as they lie in a file, if they are not converted."""
        return {name: mapped_bytes(component) for name, component in self.anatomy.components.items()}

    def as_traced(self, stage: Stage, settings: Settings) -> Settings:
        """``settings`` as they act on one stage; weights that stay or move whole are added up without a trace."""
        overflows = self._arithmetic(stage.component, settings).overflows
        precision = "fp32" if overflows else settings.precision
        traced = dataclasses.replace(settings, precision=precision, decoder_device=None)
        return traced if settings.offload in STREAMED else self._unstreamed(traced)

    def _arithmetic(self, component: str, settings: Settings) -> Arithmetic:
        key = component, settings.precision
        if key not in self._arithmetics:
            self._arithmetics[key] = arithmetic(self.anatomy, component, settings)
        return self._arithmetics[key]

    @staticmethod
    def _unstreamed(settings: Settings) -> Settings:
        return dataclasses.replace(settings, offload=None, weights_mib=None, split_layers=None)

    def _on_cpu(self, settings: Settings, stage: Stage, choice: Choice, weights: dict[str, int]) -> StagePlan:
        """The decoder in host memory, in fp32."""
        wide = self._unstreamed(dataclasses.replace(settings, precision="fp32", decoder_device=None))
        cost = self.costs(stage, wide)
        others = sum(weights.values()) - weights[stage.component]
        resident = others if settings.offload in (None, "none") else 0
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=resident,
            reserved_bytes=resident
            and self._buffers(*(size for name, size in weights.items() if name != stage.component)),
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
            size = self._arithmetic(stage.component, settings).dtype.itemsize
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

    def _seconds(self, stage: Stage, settings: Settings, once: float, weights: Weights) -> float:
        """All calls of a stage that takes ``once``, and what is copied besides."""
        seconds = (self.request.steps if stage.repeats else 1) * once
        if settings.offload == "component":  # brought once a run, or whenever its turn comes, and dropped
            turns = self.request.steps if stage.repeats and CONTROL in self.anatomy.components else 1
            seconds += turns * weights.bytes / self.request.rates.copy_bandwidth
        if settings.offload in STREAMED:  # what stays is brought once, and of a stage that runs once so is all else
            seconds += weights.bytes / self.request.rates.copy_bandwidth
        return seconds
