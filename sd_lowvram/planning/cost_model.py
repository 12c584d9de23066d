"""Costs of stages with given settings, and of the whole runs that consist of them.

A stage is traced (:mod:`.stage_costs`), placed (:mod:`.placements`), and timed (:mod:`.stage_seconds`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..devices.compiling import Compiling, compiling_of
from ..devices.disk import ASSUMED
from ..devices.performance import MEASURED_GAINS, THIS
from ..hooks.numbers.fused_kernels import kernels_in
from ..hooks.numbers.half_products import products_that_overflow
from ..hooks.numbers.precision import Arithmetic, arithmetic, fidelity_of_knobs, widen_settings
from ..hooks.registry import skipped_layers
from ..hooks.replay.compiled import is_compiled, kinds_of, were_compiled
from ..knob import Act
from ..models.anatomy import Anatomy
from ..models.calls import CONTROL, Stage
from ..settings import Fidelity, Settings, acts, only, without
from ..streaming.host_weights import RING_BYTES
from ..streaming.timing import StepTiming, layers_with_weights, timing_of
from ..tracing.flop_counter import TooManyCopiesError
from ..tracing.tracer import Figures
from .host_resident import HostMemory, HostResidentWeights, read_bytes
from .options import Choice
from .placements import Case, Placed, placement_of, processor_only
from .plan import Candidate, StagePlan
from .request import Request
from .segments import Segments
from .stage_costs import StageCosts, Step, Weights
from .stage_seconds import Counts, Work, clocks, processor_seconds, stage_seconds

_WORK = ("flops", "wide_flops", "moved_bytes", "product_bytes", "packed_bytes", "group_elements", "operators", "spans")
"""Figures of a trace that its time is computed from."""

_T = TypeVar("_T")


def _key(base: Settings, stage: Stage, choice: Choice) -> tuple[Any, ...]:
    return base, stage.name, stage.component, tuple(choice.items())


def _replace_stage(run: Candidate, number: int, stage: StagePlan) -> Candidate:
    """``run`` with another price of one stage."""
    return dataclasses.replace(run, stages=(*run.stages[:number], stage, *run.stages[number + 1 :]))


@dataclass(frozen=True)
class About:
    """Facts on a run for its plan.

    Attributes:
        fidelity: the lowest of all decided knobs, and of the number types of every component.
        timing: times of a step's modules, if weights are streamed.
        compiling: measured gain of torch.compile; None: not measured.
        unlocked_seconds: extra seconds because not all waiting weights are page-locked.
        disk: bytes a second of the disk under the weights.
        unknown_bytes: weights of a model of which nothing else is known; None: its calls are known.
        streamed_bytes: weights that are copied in the steps, all together; None: there are no steps.
    """

    fidelity: Fidelity
    timing: StepTiming | None
    compiling: Compiling | None
    unlocked_seconds: float
    disk: float
    unknown_bytes: int | None
    streamed_bytes: int | None


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
        self.host = HostMemory(anatomy, request, self._stays_in_file)
        self.segments = Segments(anatomy, request)
        self.on_gpu = request.device.type != "cpu"
        where = request.device, request.overhead
        self.costs: StageCosts = StageCosts(
            anatomy,
            request.shape,
            request.encodes,
            *where,
            like.costs if like else None,
            request.gpu,
            self.segments.joins,
        )
        self._known: dict[tuple[Any, ...], StagePlan] = {}
        self._traced_whole: set[tuple[Any, ...]] = set()
        self._memo: dict[tuple[Any, ...], Any] = {}

    def _memoised(self, what: str, component: str, stage: str, settings: Any, count: Callable[[], _T]) -> _T:
        """Result of ``count`` for a component and a stage, counted once for the settings that act there."""
        key = what, component, stage, settings
        if key not in self._memo:
            self._memo[key] = count()
        result: _T = self._memo[key]
        return result

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

    def confirm(self, run: Candidate, most_seconds: float = math.inf) -> Candidate:
        """Return ``run`` with its streamed stages traced whole, and use these figures from now on.

        Only streamed weights need this: weights that stay, or move as a whole, are added up exactly. A stage that runs
        once and has less than half of the peak is not traced, because it cannot decide anything.

        Args:
            run: the candidate.
            most_seconds: stop tracing a run that is found to take longer; its seconds are then infinite.

        Returns:
            The candidate with the figures of the whole trace.
        """
        if not self.streams(run.settings):
            return run
        half = run.peak_bytes // 2
        for number, (stage, planned) in enumerate(zip(self.costs.stages, run.stages, strict=True)):
            key = _key(run.base, stage, planned.choice)
            if key not in self._traced_whole:
                decides = stage.repeats or planned.peak_bytes >= half
                if not decides or not planned.activation_bytes:  # 0: it runs on the CPU
                    continue
                try:
                    traced = self._confirm_stage(stage, planned, run.settings, most_seconds - run.seconds)
                except TooManyCopiesError:
                    return _replace_stage(run, number, dataclasses.replace(planned, seconds=math.inf))
                self._known[key] = traced
                self._traced_whole.add(key)
            run = _replace_stage(run, number, self._known[key])
        return run

    def _confirm_stage(self, stage: Stage, planned: StagePlan, settings: Settings, beyond: float) -> StagePlan:
        """Return ``planned`` with the figures of a whole trace.

        Raises:
            TooManyCopiesError: the stage takes more than ``beyond`` seconds longer than planned.
        """
        traced = self.as_traced(stage, settings)
        short = self.costs(stage, without(traced, Act.PLACES_WEIGHTS))
        step, timing, once, most = None, None, 0, math.inf
        ring, follows, stays = self.segments.buffers(planned.weights_bytes), False, 0
        if stage.repeats:
            step, timing = self.step(stage, settings), self.timing(stage, settings)
            ring, follows = self.segments.buffers(step.device_bytes), bool(step.peak_bytes)
            stays = step.staying_bytes if follows else step.device_bytes
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
            device_seconds=planned.device_seconds + self._times(stage) * again,
            slowdown=planned.slowdown * (1 + (again / step.seconds if step else 0.0)),
            segment_bytes=self.segments.of_step(stage, whole, stays),
            cached_bytes=whole.kept_bytes - whole.reserved_bytes,
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
            self._known[key] = self._price(settings, stage, choice)
        return self._known[key]

    def priced_stages(self, base: Settings) -> list[StagePlan]:
        """All stages that were priced so far with ``base``."""
        return [stage for (placed, *_), stage in self._known.items() if placed == base]

    def weights_bytes(self, settings: Settings) -> int:
        """Bytes of the weights of all components."""
        return sum(self._weights(name, settings).bytes for name in self.anatomy.components)

    def about(self, run: Candidate) -> About:
        """Facts on ``run`` that a plan shows in addition to its stages."""
        settings, steps = run.settings, [stage for stage in self.costs.stages if stage.repeats]
        types = (self._arithmetic(name, settings).fidelity for name in self.anatomy.components)
        streams, rehearsed = self.streams(settings), self.anatomy.rehearsal is not None
        timings = [self.timing(stage, settings) for stage in (steps if rehearsed else steps[:1]) if streams]
        return About(
            fidelity=max(fidelity_of_knobs(settings), *types),
            timing=functools.reduce(StepTiming.followed_by, timings) if timings else None,
            compiling=self.compiling,
            unlocked_seconds=self._unlocked_seconds(run),
            disk=self.host.disk if any(stage.disk_bytes for stage in run.stages) else ASSUMED,
            unknown_bytes=None if self.anatomy.family.known or rehearsed else self.weights_bytes(settings),
            streamed_bytes=self.streamed_bytes(run) if steps else None,
        )

    def _price(self, settings: Settings, stage: Stage, choice: Choice) -> StagePlan:
        case = self._case(settings, stage)
        place = placement_of(case)
        placed, figures = place(case), case.figures
        if place is processor_only:
            return self._price_on_processor(case, placed, choice)
        recorded = self._is_recorded(case.acts, stage)
        reserved = figures.recorded_bytes if recorded else placed.reserved
        parked = figures.host_peak_bytes
        held = HostResidentWeights(placed.waiting, placed.waiting)
        if placed.order:
            held = self.host.hold(settings, placed.waiting, parked)
        locked, unlocked = self._locked_bytes(placed, held)
        step = placed.step
        time = stage_seconds(self._counts(settings, case, placed, held), self.request.rates, self.request.pace)
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=figures.activation_bytes + placed.weights_bytes + placed.widened,
            reserved_bytes=reserved
            + placed.widened
            + self.segments.held(stage)
            + self.segments.buffers(placed.buffer, *placed.beside)
            + (self.segments.of_recordings(recorded) if Act.RECORDS in case.acts else 0),
            weights_bytes=placed.weights_bytes,
            activation_bytes=figures.activation_bytes,
            host_bytes=held.host_bytes + parked,
            held_bytes=sum(case.weights.values())
            + (held.copied_bytes + placed.here if placed.copied else 0)
            + figures.allocated_bytes,
            largest_bytes=max(figures.largest_bytes, placed.largest),
            seconds=time.seconds,
            choice=choice,
            host_seconds=time.host,
            device_seconds=time.device,
            slowdown=time.slowdown,
            parked_bytes=parked,
            least_host_bytes=held.least_bytes + parked,
            locked_bytes=(locked + parked + (RING_BYTES if unlocked else 0)) if placed.locks and self.on_gpu else 0,
            unlocked_bytes=unlocked,
            disk_bytes=step.disk_bytes * self.request.calls if step else 0,
            disk_wait=step.disk_wait * self.request.calls if step else 0.0,
            segment_bytes=0 if step else self.segments.of_step(stage, figures),
            cached_bytes=max(0, figures.kept_bytes - reserved),
        )

    def _price_on_processor(self, case: Case, placed: Placed, choice: Choice) -> StagePlan:
        """Price a stage in host memory, in fp32, on the CPU of a machine with a GPU."""
        figures = case.figures
        host_bytes = placed.waiting + figures.peak_bytes + figures.host_peak_bytes
        return StagePlan(
            name=case.stage.name,
            component=case.component,
            peak_bytes=placed.weights_bytes,
            reserved_bytes=self.segments.buffers(*placed.beside),
            weights_bytes=placed.weights_bytes,
            activation_bytes=0,
            host_bytes=host_bytes,
            least_host_bytes=host_bytes,
            held_bytes=sum(case.weights.values()) + figures.allocated_bytes,
            largest_bytes=0,
            seconds=processor_seconds(figures, self.request.rates),
            choice=choice,
        )

    def _case(self, settings: Settings, stage: Stage) -> Case:
        acting = self._acts(settings)
        away = self.anatomy.autoencoder if self.on_gpu and Act.ON_PROCESSOR in acting else None
        traced = self.as_traced(stage, settings)
        if away == stage.component:
            figures = self.costs(stage, widen_settings(without(traced, Act.PLACES_WEIGHTS)))
        else:
            figures = self._resident(stage, traced)
        return Case(
            anatomy=self.anatomy,
            stage=stage,
            acts=acting,
            traced=traced,
            weights={name: self._weights(name, settings).bytes for name in self.anatomy.components},
            own=self._weights(stage.component, traced),
            overflows=self._arithmetic(stage.component, settings).overflows,
            figures=figures,
            away=away,
            costs=self.costs,
            step=lambda: self.step(stage, settings),
        )

    def _resident(self, stage: Stage, settings: Settings) -> Figures:
        """Return the cost of a stage with all weights on the device.

        Products of a step that are known to overflow in fp16 run in float32. They count with as many more operations as
        float32 is slower. Fused kernels take the time of the operators that they replace, unless they were measured to
        be faster: on an H100 a step with them took longer.
        """
        acting = self._acting(stage, settings)

        def count() -> Figures:
            figures = self.costs(stage, acting)
            kernels = kernels_in(acting, stage.component == self.anatomy.autoencoder)
            if kernels and not self._gains_by(kernels):
                plain = self.costs(stage, without(acting, Act.FUSES))
                figures = dataclasses.replace(figures, **{name: getattr(plain, name) for name in _WORK})
            if Act.HALVES_PRODUCTS in acts(acting):
                figures = self._widen_products(stage, figures)
            return figures

        return self._memoised("figures", stage.component, stage.name, acting, count)

    def _widen_products(self, stage: Stage, figures: Figures) -> Figures:
        overflows = products_that_overflow(self.anatomy.components[stage.component]) or (lambda path: False)
        longer = self.request.rates.half_flops / self.request.rates.float_flops
        spans = (
            dataclasses.replace(span, flops=int(span.flops * longer), wide_flops=0) if overflows(span.path) else span
            for span in figures.spans
        )
        return dataclasses.replace(figures, spans=tuple(spans))

    def _gains_by(self, kernels: tuple[str, ...]) -> bool:
        """True if fused kernels are faster, by a measurement of the GPU or of one of its generation."""
        if self.request.rates.name == THIS:
            return True  # or a plan would not offer them
        named = MEASURED_GAINS.get(self.request.rates.name, {}).items()
        gains = [gain for name, gain in named if name.startswith(kernels)]
        return bool(gains) and min(gains) > 1

    def _is_recorded(self, acting: frozenset[Act], stage: Stage) -> bool:
        return Act.RECORDS in acting and stage.component == self.anatomy.denoiser

    def _counts(self, settings: Settings, case: Case, placed: Placed, held: HostResidentWeights) -> Counts:
        """Counts of all calls of a stage, and of copying weights between calls."""
        stage = case.stage
        recorded = self._is_recorded(case.acts, stage)
        counts = Counts(
            calls=self._times(stage),
            call=self._memoised(
                "call",
                stage.component,
                stage.name,
                self._acting(stage, settings),
                lambda: clocks(self._work(settings, case), self.request.rates),
            ),
            layers=0 if self.anatomy.moved else self._lent_layers(case),
            step=placed.step,
            recorded_operators=case.figures.operators if recorded else 0,
            compiling_seconds=self._compile_gain(stage, settings)[1],
        )
        if not placed.order:
            return counts
        copies = self.host.copies(stage.component, settings, held)
        weights = {**case.weights, case.component: case.own.bytes}
        kept = None if copies.cached is None else (copies.pinned or 0) + copies.cached
        already = placed.step.disk_bytes if placed.step else 0
        read = read_bytes(case.component, placed.order, weights, held.pinned_bytes)
        on_disk = max(0, read_bytes(case.component, placed.order, weights, kept) - already)
        read = min(read, placed.brought)
        return dataclasses.replace(
            counts,
            copies=copies,
            brought_bytes=placed.brought,
            read_bytes=read,
            disk_bytes=min(read, on_disk),
            times_brought=counts.calls if placed.each_call else 1,
        )

    def _lent_layers(self, case: Case) -> int:
        """Calls of layers in a step that count, as :class:`~.stage_seconds.Counts` has them."""
        if not case.acts & {Act.MOVES_MODELS, Act.STREAMS_WEIGHTS} or not (
            case.stage.repeats or self.request.pace.layer
        ):
            return 0
        model = self.anatomy.components[case.component]
        layers = self._memoised("layers", case.component, "", None, lambda: layers_with_weights(model))
        return sum(span.path in layers for span in case.figures.spans) if case.stage.repeats else len(layers)

    def _work(self, settings: Settings, case: Case) -> Work:
        """One call of a stage with all weights on the device."""
        in_strips = Act.MAKES_STRIPS in case.acts and case.stage.name == "decode"
        work = Work(case.figures, self._computed_bytes(case.component, settings), in_strips)
        if case.component == self.anatomy.denoiser:
            if Act.RECORDS in case.acts:
                modules = sum(1 for _ in self.anatomy.components[case.component].modules())
                work = dataclasses.replace(work, replayed_modules=modules)
            if Act.SKIPS_LAYERS in case.acts:
                paths, share = skipped_layers(self.anatomy, settings, self.request.steps)
                work = dataclasses.replace(work, skipped=paths, skips=share)
        return dataclasses.replace(work, gain=self._compile_gain(case.stage, settings)[0])

    @functools.cached_property
    def compiling(self) -> Compiling | None:
        """Gain of torch.compile on the device, if it was measured."""
        return compiling_of(self.request.rates, self.request.device)

    def _compile_gain(self, stage: Stage, settings: Settings) -> tuple[float, float]:
        """Speed-up of a stage by compiled blocks, and the seconds of compiling, divided by the number of runs that make
        all pictures.
        """
        compiling = self.compiling if is_compiled(settings) else None
        kinds = self._kinds.get(stage.name) if compiling is not None else None
        if compiling is None or not kinds:
            return 1.0, 0.0
        share = self.request.batch / max(self.request.pictures, self.request.batch)
        return compiling.gain, compiling.warm_up(len(kinds), were_compiled(kinds, self.request.device)) * share

    @functools.cached_property
    def _kinds(self) -> dict[str, frozenset[Any]]:
        return kinds_of(self.anatomy)

    def _locked_bytes(self, placed: Placed, held: HostResidentWeights) -> tuple[int, int]:
        """Bytes of waiting weights that are page-locked, and of those that are not; on a GPU, for copies of ours."""
        if not placed.order or not placed.locks or not self.on_gpu:
            return 0, 0
        locked = placed.waiting if held.pinned_bytes is None else min(placed.waiting, held.pinned_bytes)
        return locked, placed.waiting - locked

    def _stays_in_file(self, name: str, settings: Settings) -> bool:
        """True if a component's mapped weights are used as they are stored in the files."""
        compressed = Act.COMPRESSES_WEIGHTS in self._acts(settings)
        return not compressed and not self._arithmetic(name, settings).converted

    def _unlocked_seconds(self, run: Candidate) -> float:
        """Seconds by which ``run`` is slower because some of its weights are not page-locked."""
        if not run.unlocked_bytes:
            return 0.0
        locked = copy.copy(self)
        locked.host = self.host.all_locked()
        slower, faster = (
            sum(
                pricing._price(run.settings, stage, planned.choice).seconds
                for stage, planned in zip(self.costs.stages, run.stages, strict=True)
            )
            for pricing in (self, locked)
        )
        return slower - faster

    def as_traced(self, stage: Stage, settings: Settings) -> Settings:
        """Return ``settings`` as a trace of ``stage`` needs them.

        Placement is left out unless weights are streamed: weights that stay, or move as a whole, are added up without a
        trace.
        """

        def count() -> Settings:
            traced = without(settings, Act.ON_PROCESSOR)
            if self._arithmetic(stage.component, settings).overflows:
                traced = widen_settings(traced)
            streams = self.streams(settings)
            return traced if streams else without(traced, Act.PLACES_WEIGHTS)

        return self._memoised("traced", stage.component, stage.name, settings, count)

    def _acts(self, settings: Settings) -> frozenset[Act]:
        return self._memoised("acts", "", "", settings, lambda: acts(settings))

    def _acting(self, stage: Stage, settings: Settings) -> Settings:
        """The knobs of ``settings`` that act in ``stage`` with all weights on the device."""

        def count() -> Settings:
            return without(settings, Act.PLACES_WEIGHTS).of_stage(stage.name)

        return self._memoised("acting", stage.component, stage.name, settings, count)

    def _weights(self, component: str, settings: Settings) -> Weights:
        placed = (Act.CONVERTS_WEIGHTS, Act.PLACES_WEIGHTS)
        stored = self._memoised("stored", "", "", settings, lambda: only(settings, *placed))
        return self._memoised("weights", component, "", stored, lambda: self.costs.weights(component, stored))

    def _arithmetic(self, component: str, settings: Settings) -> Arithmetic:
        types = self._memoised("types", "", "", settings, lambda: only(settings, Act.CONVERTS_WEIGHTS))
        return self._memoised("arithmetic", component, "", types, lambda: arithmetic(self.anatomy, component, types))

    def _computed_bytes(self, component: str, settings: Settings) -> int:
        """Bytes of an element in a component's matrix products."""
        dtype = self._arithmetic(component, settings).dtype
        return 4 if dtype == torch.bfloat16 and not self.request.rates.bf16 else dtype.itemsize

    def timing(self, stage: Stage, settings: Settings) -> StepTiming:
        """Return the times of a stage's modules with their weights on the device, and the cost of
        copying the weights.
        """
        figures = self._resident(stage, self.as_traced(stage, settings))
        held = self.host.hold(settings, self.weights_bytes(settings), figures.host_peak_bytes)

        def count() -> StepTiming:
            size = self._computed_bytes(stage.component, settings)
            model, copies = self.anatomy.components[stage.component], self.host.copies(stage.component, settings, held)
            pace = self.request.pace.layer
            timing = timing_of(stage.component, model, figures.spans, self.request.rates, size, copies, pace)
            # a ControlNet shares the ring, and has maps of its own
            alone = CONTROL not in self.anatomy.components and all(len(group) == 1 for group in self.anatomy.steps)
            return dataclasses.replace(timing, maps=tuple(span.held_bytes for span in figures.spans) if alone else ())

        acting = self._acting(stage, settings)
        return self._memoised(
            "timing", stage.component, stage.name, (acting, held.pinned_bytes, held.cached_bytes), count
        )

    def step(self, stage: Stage, settings: Settings) -> Step:
        """Return the cost of one denoising step with streamed weights."""
        return self.costs.step(stage, self.as_traced(stage, settings), self.timing(stage, settings))

    def streams(self, settings: Settings) -> bool:
        """Return True if weights are streamed with ``settings``."""
        return Act.STREAMS_WEIGHTS in self._acts(settings)

    def streamed_bytes(self, run: Candidate) -> int:
        """Return the bytes of weights that are copied in the steps of ``run``, all together."""
        if not self.streams(run.settings):
            return 0
        steps = [stage for stage in self.costs.stages if stage.repeats]
        return sum(self._times(stage) * self.step(stage, run.settings).streamed_bytes for stage in steps)

    def _times(self, stage: Stage) -> int:
        """Number of times that a stage runs in a run."""
        if stage.times:
            return stage.times
        return self.request.steps * self.request.calls if stage.repeats else 1
