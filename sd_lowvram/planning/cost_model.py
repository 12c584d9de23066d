"""Costs of stages with given settings, and of the whole runs that consist of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..devices.compiling import Compiling, compiling_of
from ..devices.disk import ASSUMED, disk_rate
from ..devices.performance import MEASURED_GAINS, THIS
from ..devices.this_machine import rates_of
from ..hooks.channels_last import reordered_weights
from ..hooks.compiled import is_compiled, kinds_of, were_compiled
from ..hooks.deep_cache import deep_modules
from ..hooks.fused_kernels import in_autoencoder
from ..hooks.half_products import products_that_overflow
from ..hooks.offload import step_groups
from ..hooks.precision import Arithmetic, arithmetic
from ..kernels.triton.support import FUSED_AUTOENCODER, FUSED_DENOISER
from ..memory.caching_allocator import SMALL
from ..memory.pinned import PINNED_SHARE, most_pinned_bytes
from ..memory.reserved import segment
from ..memory.threads import pause_models
from ..models.anatomy import Anatomy
from ..models.latents import latent_channels, latent_size
from ..settings import STREAMED, Fidelity, Settings
from ..streaming.host_weights import RING_BYTES, bytes_also_in_files
from ..streaming.mapped_files import MappedFiles, can_read_past_cache
from ..streaming.simulator import CopyQueue
from ..streaming.timing import LAYER_LAUNCHES, StepTiming, layers_with_weights, timing_of
from ..tracing.flop_counter import TooManyCopiesError
from ..tracing.tracer import Figures
from ..units import MIB
from ..weights import all_tensors
from .host_resident import HostResidentWeights, host_resident, read_bytes
from .options import Choice
from .plan import Candidate, StagePlan
from .request import Budget, Request
from .stage_costs import StageCosts, Step, Weights
from .stages import CONTROL, Stage

_PINNED_STEP = 256 * MIB

_REPLAY_LAUNCHES = 0.22
"""Host time while a recorded pass runs, in launches for each module of the model, which are looked through.

Fitted to 6.2 ms of a step of SD1.5 at 512x512 on an H100."""

_WORK = ("flops", "wide_flops", "moved_bytes", "product_bytes", "packed_bytes", "operators", "spans")
"""Figures of a trace that its time is computed from."""


def _key(base: Settings, stage: Stage, choice: Choice) -> tuple[Any, ...]:
    return base, stage.name, stage.component, tuple(choice.items())


def _with_stage(run: Candidate, number: int, stage: StagePlan) -> Candidate:
    """``run`` with another price of one stage."""
    return dataclasses.replace(run, stages=(*run.stages[:number], stage, *run.stages[number + 1 :]))


class Pricing:
    """Bytes and seconds of one request's stages, with given settings."""

    def __init__(self, anatomy: Anatomy, request: Request, like: Pricing | None = None) -> None:
        """
        Args:
            anatomy: parts of the target.
            request: picture, budgets and rates.
            like: prices of the same model for another size; its fake copy is reused.
        """
        self.anatomy = anatomy
        self.request = request
        self.vram, self.ram = Budget(request.vram), Budget(request.ram)
        where = request.device, request.overhead
        self.costs: StageCosts = StageCosts(
            anatomy, request.shape, request.encodes, *where, like.costs if like else None, request.gpu
        )
        self.on_gpu = request.device.type != "cpu"
        self._locks_all = False
        self._known: dict[tuple[Any, ...], StagePlan] = {}
        self._traced_whole: set[tuple[Any, ...]] = set()
        self._bytes_in_files: dict[str, tuple[int, int]] | None = None
        self._timings: dict[Any, StepTiming] = {}
        self._calls: dict[tuple[int, int, bool], tuple[Figures, float]] = {}
        self._arithmetics: dict[tuple[str, str | None], Arithmetic] = {}
        self._widened: dict[int, tuple[Figures, Figures]] = {}
        self._unfused: dict[int, tuple[Figures, Figures]] = {}

    def whole(self, base: Settings, options: Iterable[Candidate]) -> Candidate:
        """Return the run that consists of ``options``, with its stages in their order.

        Args:
            base: the knobs that all stages share, with the placement of the weights.
            options: the chosen option of each group of stages.
        """
        chosen = {(stage.name, stage.component): stage for option in options for stage in option.stages}
        ordered = tuple(chosen[stage.name, stage.component] for stage in self.costs.stages)
        knobs = {name: value for stage in ordered for name, value in stage.choice.items()}
        return Candidate(base.filled(**knobs), ordered, self.request.overhead_bytes, base)

    def confirmed(self, run: Candidate, most_seconds: float = math.inf) -> Candidate:
        """Return ``run`` with its streamed stages traced whole, and use these figures from now on.

        Only streamed weights need this: weights that stay, or move as a whole, are added up exactly. A stage that runs
        once and has less than half of the peak is not traced, because it cannot decide anything.

        Args:
            run: the candidate.
            most_seconds: stop tracing a run that is found to take longer; its seconds are then infinite.

        Returns:
            The candidate with the figures of the whole trace.
        """
        if run.settings.offload not in STREAMED:
            return run
        half = run.peak_bytes // 2
        for number, (stage, planned) in enumerate(zip(self.costs.stages, run.stages, strict=True)):
            key = _key(run.base, stage, planned.choice)
            if key not in self._traced_whole:
                decides = stage.repeats or planned.peak_bytes >= half
                if not decides or not planned.activation_bytes:  # 0: it runs on the CPU
                    continue
                try:
                    traced = self._confirmed(stage, planned, run.settings, most_seconds - run.seconds)
                except TooManyCopiesError:
                    return _with_stage(run, number, dataclasses.replace(planned, seconds=math.inf))
                self._known[key] = traced
                self._traced_whole.add(key)
            run = _with_stage(run, number, self._known[key])
        return run

    def _confirmed(self, stage: Stage, planned: StagePlan, settings: Settings, beyond: float) -> StagePlan:
        """Return ``planned`` with the figures of a whole trace.

        Raises:
            TooManyCopiesError: the stage takes more than ``beyond`` seconds longer than planned.
        """
        traced = self.as_traced(stage, settings)
        short, step, timing, once, most = self.costs(stage, self._unstreamed(traced)), None, None, 0, math.inf
        ring, follows = self._buffers(planned.weights_bytes), False
        if stage.repeats:
            step, timing = self.step(stage, settings), self.timing(stage, settings)
            ring, follows = self._buffers(step.device_bytes), bool(step.peak_bytes)
            # the traced step is the first, so it also copies the residents
            once = short.copied_bytes + step.streamed_bytes + step.device_bytes
            most = once + beyond / self._times(stage) * self.request.rates.copy_bandwidth
        whole = self.costs(stage, traced, timing, most)
        more = max(0, whole.peak_bytes - planned.peak_bytes)
        # strips whose weights together exceed the buffer fetch them more than once
        again = max(0, whole.copied_bytes - once) / self.request.rates.copy_bandwidth if step else 0.0
        reserved = whole.reserved_bytes - short.reserved_bytes - ring
        if not follows:  # a ring that follows the activations shares segments with them
            reserved = max(0, reserved)
        return dataclasses.replace(
            planned,
            peak_bytes=planned.peak_bytes + more,
            reserved_bytes=max(planned.reserved_bytes + reserved, planned.peak_bytes + more),
            activation_bytes=planned.activation_bytes + more,
            seconds=planned.seconds + self._times(stage) * again,
            slowdown=planned.slowdown * (1 + (again / step.seconds if step else 0.0)),
        )

    def stage(self, settings: Settings, stage: Stage, choice: Choice, base: Settings) -> StagePlan:
        """Price a stage with ``settings`` (``base`` plus the knobs of ``choice``), once.

        Args:
            settings: ``base`` plus the knobs of ``choice``.
            stage: the stage.
            choice: its knobs.
            base: the knobs that all stages share.

        Returns:
            Its bytes and seconds, from the whole trace if there was one.
        """
        key = _key(base, stage, choice)
        if key not in self._known:
            self._known[key] = self._priced(settings, stage, choice)
        return self._known[key]

    def priced(self, base: Settings) -> list[StagePlan]:
        """All stages that were priced so far with ``base``."""
        return [stage for (placed, *_), stage in self._known.items() if placed == base]

    def weights_bytes(self, settings: Settings) -> int:
        """Bytes of the weights of all components."""
        return sum(self.costs.weights(name, settings).bytes for name in self.anatomy.components)

    def runs_often(self, planned: StagePlan) -> bool:
        """True if a stage runs in every step."""
        return any(
            stage.repeats
            for stage in self.costs.stages
            if (stage.name, stage.component) == (planned.name, planned.component)
        )

    def fidelity(self, settings: Settings) -> Fidelity:
        """Return the lowest fidelity of all decided knobs, and of the number types of every component."""
        others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
        return max(*(self._arithmetic(name, settings).fidelity for name in self.anatomy.components), *others)

    def _priced(self, settings: Settings, stage: Stage, choice: Choice) -> StagePlan:
        weights = {name: self.costs.weights(name, settings).bytes for name in self.anatomy.components}
        away = self.on_gpu and settings.decoder_device == "cpu"
        if away and stage.component == self.anatomy.autoencoder:
            return self._on_cpu(settings, stage, choice, weights)
        traced = self.as_traced(stage, settings)
        cost = self._resident(stage, self._unstreamed(traced))
        own = self.costs.weights(stage.component, traced)
        streamed = settings.offload in STREAMED
        step = self.step(stage, settings) if streamed and stage.repeats else None
        here = step.beside(cost.activation_bytes) if step else self._room(traced, stage.component, own)
        elsewhere = {stage.component, self.anatomy.autoencoder if away else None}
        stays = settings.offload in (None, "none")
        beside = [size for name, size in weights.items() if name not in elsewhere] if stays else []
        resident = sum(beside)
        waiting = sum(weights.values()) - resident - (own.bytes if stays else 0)
        on_host = self._host_resident(settings, max(0, waiting), cost.host_peak_bytes)
        ours = not stays and not self.anatomy.moved
        copied = here if ours else 0  # copies on the device, in addition to those in host memory
        locks = self.on_gpu and not self.anatomy.moved
        locked = waiting if on_host.pinned_bytes is None else min(waiting, on_host.pinned_bytes)
        locked, unlocked = (locked, waiting - locked) if locks and not stays else (0, 0)
        widened = weights[stage.component] if stays and self._arithmetic(stage.component, settings).overflows else 0
        held = max(0, widened - cost.activation_bytes)  # fp16 and fp32 copies coexist until the last tensor is widened
        recorded = bool(settings.cuda_graphs) and stage.component == self.anatomy.denoiser
        plain = self._once(stage, settings, cost, recorded)
        plain *= self._computed(stage, settings, cost) / self._gain(stage, settings)
        plain += self._fetching(stage, settings)
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=cost.activation_bytes + here + resident + held,
            reserved_bytes=(
                cost.recorded_bytes if recorded else cost.reserved_bytes if streamed else cost.repeated_bytes
            )
            + held
            + self._pipeline_bytes
            + (self._scattered if stage.repeats or stage.name == "decode" else 0)
            + self._buffers(step.device_bytes if step else here, *beside)
            + (
                self._pipeline_bytes + self.request.overhead.matrix_bytes
                if recorded
                else self._left_of_recordings(settings)
            ),
            weights_bytes=here + resident,
            activation_bytes=cost.activation_bytes,
            host_bytes=on_host.host_bytes + cost.host_peak_bytes,
            held_bytes=sum(weights.values()) + (on_host.copied_bytes + copied if ours else 0) + cost.allocated_bytes,
            largest_bytes=max(cost.largest_bytes, step.largest_bytes if step and ours else copied or own.largest_bytes),
            seconds=self._seconds(stage, settings, step or plain, weights | {stage.component: own.bytes}, on_host)
            + self._warm_up(stage, settings)
            + (2 * cost.operators * self.request.rates.launch_seconds if recorded else 0),
            choice=choice,
            slowdown=step.seconds / plain if step and plain else 1.0,
            parked_bytes=cost.host_peak_bytes,
            least_host_bytes=on_host.least_bytes + cost.host_peak_bytes,
            locked_bytes=(locked + cost.host_peak_bytes + (RING_BYTES if unlocked else 0)) if locks else 0,
            unlocked_bytes=unlocked,
            disk_bytes=step.disk_bytes * self.request.calls if step else 0,
            disk_wait=step.disk_wait * self.request.calls if step else 0.0,
        )

    def _resident(self, stage: Stage, settings: Settings) -> Figures:
        """Return the cost of a stage with all weights on the device.

        Products of a step that are known to overflow in fp16 run in float32. They count with as many more operations as
        float32 is slower. Fused kernels take the time of the operators that they replace, unless they were measured to
        be faster: on an H100 a step with them took longer.
        """
        cost, rates = self.costs(stage, settings), self.request.rates
        in_decoder = stage.component == self.anatomy.autoencoder
        fused = in_autoencoder(settings) if in_decoder else settings.fused_kernels
        if fused and not self._gains_by_fused(stage):
            if id(cost) not in self._unfused:
                plain = self.costs(stage, dataclasses.replace(settings, fused_kernels=None, vae_fused_kernels=None))
                work = {name: getattr(plain, name) for name in _WORK}
                self._unfused[id(cost)] = cost, dataclasses.replace(cost, **work)
            cost = self._unfused[id(cost)][1]
        if settings.precision != "fp16-products" or not cost.spans:
            return cost
        if id(cost) not in self._widened:  # the figures are stored too, so that their id is not reused
            overflows = products_that_overflow(self.anatomy.components[stage.component]) or (lambda path: False)
            longer = rates.half_flops / rates.float_flops
            spans = (
                dataclasses.replace(span, flops=int(span.flops * longer), wide_flops=0)
                if overflows(span.path)
                else span
                for span in cost.spans
            )
            self._widened[id(cost)] = cost, dataclasses.replace(cost, spans=tuple(spans))
        return self._widened[id(cost)][1]

    def _gains_by_fused(self, stage: Stage) -> bool:
        """True if fused kernels are faster in a stage, by a measurement of the GPU or of one of its generation."""
        if self.request.rates.name == THIS:
            return True  # or a plan would not offer them
        named = MEASURED_GAINS.get(self.request.rates.name, {}).items()
        kernels = FUSED_AUTOENCODER if stage.component == self.anatomy.autoencoder else FUSED_DENOISER
        gains = [gain for name, gain in named if name.startswith(kernels)]
        return bool(gains) and min(gains) > 1

    def _once(self, stage: Stage, settings: Settings, cost: Figures, recorded: bool) -> float:
        """Return the seconds of one call of a stage whose weights are on the device.

        Args:
            recorded: True if one recorded graph is launched in place of every operator.
        """
        size = self._computed_bytes(stage.component, settings)
        key = id(cost), size, recorded
        if key not in self._calls:  # the figures are stored too, so that their id is not reused
            seconds = self.request.rates.seconds(cost, size, 1 if recorded else None)
            self._calls[key] = cost, max(seconds, self._replaying(stage.component) if recorded else 0.0)
        return self._calls[key][1]

    def _fetching(self, stage: Stage, settings: Settings) -> float:
        """Host seconds of another program that fetches the layers of a stage that runs once."""
        if stage.repeats or self.request.pace.layer is None or settings.offload not in STREAMED:
            return 0.0
        layers = len(layers_with_weights(self.anatomy.components[stage.component]))
        return layers * self.request.pace.layer * self.request.rates.launch_seconds

    def _replaying(self, component: str) -> float:
        """Seconds of the host during a replay of a recorded pass."""
        modules = sum(1 for _ in self.anatomy.components[component].modules())
        return _REPLAY_LAUNCHES * modules * self.request.rates.launch_seconds

    def _computed(self, stage: Stage, settings: Settings, cost: Figures) -> float:
        """Return the part of a step's time that deep caching leaves, on average over all steps; 1
        without deep caching.
        """
        if settings.deep_cache is None or stage.component != self.anatomy.denoiser or not cost.spans:
            return 1.0
        deep = set(deep_modules(self.anatomy, settings))
        paths = {name for name, module in self.anatomy.components[stage.component].named_modules() if module in deep}
        size = self._computed_bytes(stage.component, settings)
        seconds = list(zip(cost.spans, self.request.rates.shares(cost.spans, size), strict=True))
        passed = sum(taken for span, taken in seconds if any(f"{span.path}.".startswith(f"{path}.") for path in paths))
        full = -(-self.request.steps // settings.deep_cache) / self.request.steps
        return 1 - (1 - full) * passed / sum(taken for _, taken in seconds)

    @functools.cached_property
    def compiling(self) -> Compiling | None:
        """Gain of torch.compile on the device, if it was measured."""
        return compiling_of(self.request.rates, self.request.device)

    def _gain(self, stage: Stage, settings: Settings) -> float:
        """Speed-up of a stage by compiled blocks; 1 if nothing is compiled."""
        compiling = self.compiling if is_compiled(settings) else None
        return compiling.gain if compiling is not None and self._kinds.get(stage.name) else 1.0

    def _warm_up(self, stage: Stage, settings: Settings) -> float:
        """Seconds of compiling, divided by the number of runs that make all pictures."""
        compiling = self.compiling if is_compiled(settings) else None
        kinds = self._kinds.get(stage.name) if compiling is not None else None
        if compiling is None or not kinds:
            return 0.0
        share = self.request.batch / max(self.request.pictures, self.request.batch)
        return compiling.warm_up(len(kinds), were_compiled(kinds, self.request.device)) * share

    @functools.cached_property
    def _kinds(self) -> dict[str, frozenset[Any]]:
        return kinds_of(self.anatomy)

    def _left_of_recordings(self, settings: Settings) -> int:
        """Bytes of cuBLAS' workspace for the stream that records passes.

        The workspace stays after the recordings are freed, and during other stages.
        """
        return segment(self.request.overhead.matrix_bytes) if settings.cuda_graphs else 0

    @functools.cached_property
    def _pipeline_bytes(self) -> int:
        """Segments for prompt embeddings (1 MiB) and four fp32 latents, which a pipeline holds during a stage."""
        pixels = math.prod(latent_size(self.anatomy, self.request.shape)) * self.request.batch
        latents = 4 * latent_channels(self.anatomy) * pixels
        return -(-(4 * latents + MIB) // segment(latents)) * segment(latents) if self.on_gpu else 0

    @functools.cached_property
    def _scattered(self) -> int:
        """Rounding waste: each ControlNet or adapter residual stays from step to step and may pin a
        segment of its own.
        """
        if not self.on_gpu or self.anatomy.denoiser is None or not self.anatomy.family.known:
            return 0
        with torch.device("meta"):
            step = self.anatomy.family.step_inputs(self.anatomy, self.request.shape)
        sizes = [tensor.numel() * tensor.element_size() for tensor in (*step.residuals, *step.features)]
        return sum(segment(size) - size for size in sizes if size > SMALL)

    def _buffers(self, *sizes: int) -> int:
        """Bytes that the device reserves for weight buffers of these sizes."""
        return sum(map(segment, sizes)) if self.on_gpu else sum(sizes)

    def _host_resident(self, settings: Settings, weights: int, parked: int) -> HostResidentWeights:
        """Distribute ``weights`` bytes over the host memory that ``parked`` bytes of maps leave."""
        if settings.offload in (None, "none"):
            return HostResidentWeights(weights, weights)
        mapped = sum(size for name, (size, _) in self._in_files.items() if self._stays_in_file(name, settings))
        pinnable = None if self._pinnable is None else max(0, self._pinnable - parked)
        resident = host_resident(weights, mapped, self.request.ram - parked, pinnable)
        if self._locks_all:
            return dataclasses.replace(resident, pinned_bytes=None, cached_bytes=None)
        if resident.pinned_bytes is None:
            share = PINNED_SHARE if self.on_gpu and self.request.rates.name != THIS else 1
            self.ram.holds(math.ceil((weights + parked + RING_BYTES) / share))
        for more in (0, 1):  # budgets above this use give the same plan; if all RAM is used, this one alone does
            self.ram.holds((resident.host_bytes + parked if resident.pinned_bytes is None else self.request.ram) + more)
        return resident

    def _stays_in_file(self, name: str, settings: Settings) -> bool:
        """True if a component's mapped weights are used as they are stored in the files."""
        return settings.weight_storage is None and not self._arithmetic(name, settings).converted

    @functools.cached_property
    def disk(self) -> float:
        """Bytes a second of the disk under the weights; measured only if not all weights fit in memory."""
        if self.request.disk is None and self.request.rates.name == THIS:
            files = MappedFiles()
            tensors = all_tensors(*self.anatomy.components.values())
            file = next(filter(None, map(files.file, tensors)), None)
            return (disk_rate(Path(file)) if file else None) or ASSUMED
        return self.request.disk or ASSUMED

    @functools.cached_property
    def _pinnable(self) -> int | None:
        """The most that may be page-locked, the same for a whole search; None: all, where nothing is copied to a GPU.

        Of another machine's memory the budget is all that is known. Here the figure comes in steps, so that a plan in
        the cache serves the next request.
        """
        if self.request.rates.name != THIS:
            return int(PINNED_SHARE * self.request.ram) if self.on_gpu else None
        most = most_pinned_bytes()
        return most - most % min(_PINNED_STEP, max(1, most // 8))

    def unlocked_seconds(self, run: Candidate) -> float:
        """Seconds by which ``run`` is slower because some of its weights are not page-locked."""
        if not run.unlocked_bytes:
            return 0.0
        pairs = list(zip(self.costs.stages, run.stages, strict=True))

        def seconds() -> float:
            return sum(self._priced(run.settings, stage, planned.choice).seconds for stage, planned in pairs)

        self._locks_all = True
        try:
            least = seconds()
        finally:
            self._locks_all = False
        return seconds() - least

    @property
    def _in_files(self) -> dict[str, tuple[int, int]]:
        """Bytes of each component that are read from a mapped file as they are, if no knob converts them.

        The second number is the part in convolution kernels, which channels last reorders.
        """
        if self._bytes_in_files is None:
            parts = self.anatomy.components
            with pause_models(parts.values()):  # weights that are lent to a call are not in their files
                self._bytes_in_files = {
                    name: (bytes_also_in_files(all_tensors(part)), bytes_also_in_files(reordered_weights(part)))
                    for name, part in parts.items()
                }
        return self._bytes_in_files

    def as_traced(self, stage: Stage, settings: Settings) -> Settings:
        """Return ``settings`` as a trace of ``stage`` needs them.

        Placement is left out unless weights are streamed: weights that stay, or move as a whole, are added up without a
        trace.
        """
        overflows = self._arithmetic(stage.component, settings).overflows
        precision = "fp32" if overflows else settings.precision
        traced = dataclasses.replace(settings, precision=precision, decoder_device=None)
        return traced if settings.offload in STREAMED else self._unstreamed(traced)

    def _arithmetic(self, component: str, settings: Settings) -> Arithmetic:
        key = component, settings.precision
        if key not in self._arithmetics:
            self._arithmetics[key] = arithmetic(self.anatomy, component, settings)
        return self._arithmetics[key]

    def _computed_bytes(self, component: str, settings: Settings) -> int:
        """Bytes of an element in a component's matrix products."""
        dtype = self._arithmetic(component, settings).dtype
        return 4 if dtype == torch.bfloat16 and not self.request.rates.bf16 else dtype.itemsize

    @staticmethod
    def _unstreamed(settings: Settings) -> Settings:
        return dataclasses.replace(settings, offload=None, weights_mib=None, split_layers=None)

    def _on_cpu(self, settings: Settings, stage: Stage, choice: Choice, weights: dict[str, int]) -> StagePlan:
        """Price the decoder in host memory, in fp32, on the CPU."""
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
            seconds=self._on_processor(cost),
            choice=choice,
        )

    def _on_processor(self, cost: Figures) -> float:
        """Seconds of a stage on the CPU of a machine with a GPU; calibrated if it is this machine."""
        rates = self.request.rates
        if rates.name == THIS:
            return rates_of(torch.device("cpu")).seconds(cost, torch.float32.itemsize)
        return cost.flops / rates.processor_flops

    def timing(self, stage: Stage, settings: Settings) -> StepTiming:
        """Return the times of a stage's modules with their weights on the device, and the cost of
        copying the weights.
        """
        resident = self._unstreamed(self.as_traced(stage, settings)).of_stage(stage.name)
        cost = self._resident(stage, resident)
        on_host = self._host_resident(settings, self.weights_bytes(settings), cost.host_peak_bytes)
        key = stage.name, stage.component, resident, on_host.pinned_bytes, on_host.cached_bytes
        if key not in self._timings:
            size = self._computed_bytes(stage.component, settings)
            model, copies = self.anatomy.components[stage.component], self._copies(stage, settings, on_host)
            layer = self.request.pace.layer
            layer = LAYER_LAUNCHES if layer is None else layer
            timing = timing_of(stage.component, model, cost.spans, self.request.rates, size, copies, layer)
            # a ControlNet shares the ring, and has maps of its own
            alone = CONTROL not in self.anatomy.components and all(len(group) == 1 for group in self.anatomy.steps)
            maps = tuple(span.held_bytes for span in cost.spans) if alone else ()
            self._timings[key] = dataclasses.replace(timing, maps=maps)
        return self._timings[key]

    def step(self, stage: Stage, settings: Settings) -> Step:
        """Return the cost of one denoising step with streamed weights."""
        return self.costs.step(stage, self.as_traced(stage, settings), self.timing(stage, settings))

    def _room(self, settings: Settings, component: str, weights: Weights) -> int:
        """Bytes of weights on the device during a stage that runs once."""
        if settings.weights_mib is not None and settings.offload in ("blocks", "layer"):
            return self.costs.room(component, settings)
        if settings.offload == "layer":
            return weights.room_bytes
        return min(weights.bytes, self.anatomy.kept.get(component, weights.bytes))

    def _seconds(
        self,
        stage: Stage,
        settings: Settings,
        once: Step | float,
        weights: dict[str, int],
        on_host: HostResidentWeights,
    ) -> float:
        """Return the seconds of all calls of a stage, and of copying weights between calls.

        Args:
            once: cost of one call: a step with streamed weights, or seconds.
        """
        taken, already = (once.seconds, once.disk_bytes) if isinstance(once, Step) else (once, 0)
        seconds = self._times(stage) * taken
        if settings.offload in (None, "none"):
            return seconds
        groups = step_groups(self.anatomy, self.anatomy.components) if settings.offload in STREAMED else [weights]
        order = [name for group in groups for name in group]
        read = read_bytes(stage.component, order, weights, on_host.pinned_bytes)
        copies = self._copies(stage, settings, on_host)
        held = None if copies.cached is None else (copies.pinned or 0) + copies.cached
        from_disk = max(0, read_bytes(stage.component, order, weights, held) - already)
        brought = once.staying_bytes if isinstance(once, Step) else weights[stage.component]
        read = min(read, brought)
        copying = copies.seconds(brought, read, min(read, from_disk))
        # Component offload reloads per step only if a ControlNet alternates with the UNet; otherwise weights cross the
        # bus once.
        again = settings.offload == "component" and stage.repeats and CONTROL in self.anatomy.components
        return seconds + (self._times(stage) if again else 1) * copying

    def _times(self, stage: Stage) -> int:
        """Number of times that a stage runs in a run."""
        if stage.times:
            return stage.times
        return self.request.steps * self.request.calls if stage.repeats else 1

    def _copies(self, stage: Stage, settings: Settings, on_host: HostResidentWeights) -> CopyQueue:
        rates, (size, kernels) = self.request.rates, self._in_files[stage.component]
        filling = rates.filling(size, kernels if settings.channels_last else 0)
        overlap = self.on_gpu and self.request.pace.overlaps
        copies = CopyQueue(rates.copy_bandwidth, overlap=overlap, reading=filling, pinned=on_host.pinned_bytes)
        if on_host.cached_bytes is None or not size or not self._stays_in_file(stage.component, settings):
            return copies
        cached = on_host.cached_bytes
        if not can_read_past_cache() and size > (on_host.pinned_bytes or 0) + cached:
            cached = 0  # it drops what was read longest ago: of weights that are read in a circle, everything
        return dataclasses.replace(copies, disk=self.disk, cached=cached)
