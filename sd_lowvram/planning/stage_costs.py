"""Costs of a stage with given settings: traced once on a fake copy of the model, and cached on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..cache import place_of, recall, remember
from ..compat.private import tree_flatten
from ..devices.overhead import NONE, Overhead
from ..errors import LowVRAMError, PlanningError, ran_out
from ..hooks.numbers.weight_storage import quantised_layers
from ..hooks.parking.offload import policy_of, single_layers, step_groups, trim_buffer
from ..kernels.attention.problem import PlannedGpu, assume_gpu
from ..kernels.cpu_convolutions import facts as cpu_facts
from ..knob import Act
from ..memory import kernels_of
from ..memory.reserved import allocator_settings
from ..memory.threads import pause_models
from ..models.anatomy import Anatomy
from ..models.calls import Shape, Stage
from ..settings import Settings, acts, only, without
from ..streaming.layout import lay_down, most_bytes
from ..streaming.simulator import simulate, simulate_first
from ..streaming.timing import ModuleSpan, StepTiming, schedule_units
from ..tracing import MemoryTrace
from ..tracing.fake_model import FakeModel
from ..tracing.flop_counter import TooManyCopiesError
from ..tracing.tracer import Figures, trace_equals_once
from ..weights import all_tensors, weight_bytes
from .stages import stages

_Kind = TypeVar("_Kind", Figures, "Step", "Weights", "Streamed", "Tried")


@dataclass(frozen=True)
class Weights:
    """Bytes of one component's weights.

    Attributes:
        bytes: of all weights.
        largest_bytes: of the largest weight.
        room_bytes: on the device when layers are streamed one at a time, the ring included; 0 if they are not streamed.
    """

    bytes: int
    largest_bytes: int
    room_bytes: int


@dataclass(frozen=True)
class Streamed:
    """Weights of a component that runs once, streamed.

    Attributes:
        device_bytes: the most bytes of them on the device.
    """

    device_bytes: int


@dataclass(frozen=True)
class Tried:
    """Result of a trace with a limit of copied bytes.

    Attributes:
        ended: True if the limit was reached.
    """

    ended: bool


@dataclass(frozen=True)
class Step:
    """A repeated call of a component whose weights are streamed.

    Attributes:
        seconds: duration, with copies overlapping compute.
        device_bytes: the most bytes of weights on the device: residents and ring.
        staying_bytes: bytes of resident weights.
        streamed_bytes: bytes of weights that are copied in every call.
        largest_bytes: the largest allocation for weights.
        peak_bytes: peak of weights and activations together, if the ring follows the activations; 0 if it does not.
        disk_bytes: the part of ``streamed_bytes`` that is read from disk.
        disk_wait: the part of ``seconds`` that is spent waiting for the disk.
        first_wait: the seconds that the first step takes longer, because it fetches the residents too.
        fetches: number of copies of weights in every call.
    """

    seconds: float
    device_bytes: int
    staying_bytes: int
    streamed_bytes: int
    largest_bytes: int
    peak_bytes: int
    disk_bytes: int = 0
    disk_wait: float = 0.0
    first_wait: float = 0.0
    fetches: int = 0

    def added_bytes(self, activation_bytes: int) -> int:
        """Bytes that weights add to a peak of ``activation_bytes``."""
        return max(0, self.peak_bytes - activation_bytes) if self.peak_bytes else self.device_bytes


class StageCosts:
    """Costs of the stages of one model for one shape, each traced when it is first requested."""

    def __init__(
        self,
        anatomy: Anatomy,
        shape: Shape,
        encodes: bool,
        device: torch.device,
        overhead: Overhead = NONE,
        like: StageCosts | None = None,
        gpu: PlannedGpu | None = None,
        joins: bool = True,
    ) -> None:
        """
        Args:
            anatomy: parts of the target.
            shape: of the picture.
            encodes: True if the run starts from a picture.
            device: device that is planned for.
            overhead: of ``device``; the libraries' workspaces are counted where they are allocated.
            like: costs of the same model for another shape; its fake copy and results are reused.
            gpu: what is known of ``device``; None: it is this machine's, and computes in bf16.
            joins: False: steps never share one segment for their large tensors, so its bytes are 0.
        """
        self._anatomy = anatomy
        self._device = device
        self._overhead = overhead
        self._gpu = gpu or PlannedGpu()
        self._shape = shape
        self._encodes = encodes
        self._joins = joins
        self._fake: FakeModel = like._fake if like else FakeModel(anatomy, device)
        self._quantised: frozenset[str] | None = None
        self._known: dict[Any, Any] = like._known if like else {}
        self._streamed: dict[Any, list[tuple[Settings, Figures]]] = {}

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """Stages of a run, in order."""
        return self._stages_of(self._anatomy)

    def _stages_of(self, anatomy: Anatomy) -> list[Stage]:
        """The stages of the model or of its fake copy, which may have been made for calls of another size."""
        called = dataclasses.replace(anatomy, rehearsal=self._anatomy.rehearsal)
        return stages(called, self._shape, self._encodes)

    def weights(self, name: str, settings: Settings) -> Weights:
        """Return the bytes of a component's weights in the precision and storage that ``settings`` request.

        Args:
            name: name of the component.
            settings: knobs that convert or place weights are read.

        Raises:
            ConflictError: the weights would wait in host memory, and cannot.
        """
        stored, policy = self._storage_knobs(name, settings), single_layers(settings)
        waits = Act.PARKS_WEIGHTS in acts(settings)

        def count() -> Weights:
            component = self._fake.anatomy.components[name]
            with self._fake.running(name, stored):
                room = lay_down(self._fake.layers({name: component}, stored), policy, {}).bytes if waits else 0
                largest = max((tensor.numel() * tensor.element_size() for tensor in all_tensors(component)), default=0)
                return Weights(weight_bytes(component), largest, room)

        return self._cached(Weights, name, (stored, waits, policy.split), count)

    def room(self, name: str, settings: Settings) -> int:
        """Return the most bytes of streamed weights on the device during a component that runs once.

        Args:
            name: name of the component.
            settings: knobs that convert or place weights are read.
        """
        stored, policy = self._storage_knobs(name, settings), policy_of(settings, denoises=False)

        def count() -> Streamed:
            component = self._fake.anatomy.components[name]
            with self._fake.running(name, stored):
                return Streamed(most_bytes(self._fake.layers({name: component}, stored), policy))

        return self._cached(Streamed, name, (stored, policy), count).device_bytes

    def _storage_knobs(self, name: str, settings: Settings) -> Settings:
        """The knobs of ``settings`` that change the bytes of a component's weights."""
        same_bytes = [Act.REORDERS_KERNELS] + ([] if name in self.quantised else [Act.COMPRESSES_WEIGHTS])
        return without(only(settings, Act.CONVERTS_WEIGHTS), *same_bytes)

    @property
    def quantised(self) -> frozenset[str]:
        """Components of which weights can be stored in 8 bits."""
        if self._quantised is None:
            parts = self._anatomy.components
            with pause_models(parts.values()):
                quantised = (name for name in parts if quantised_layers(self._anatomy, name, as_loaded=True))
                self._quantised = frozenset(quantised)
        return self._quantised

    def __call__(
        self, stage: Stage, settings: Settings, timing: StepTiming | None = None, most_copied: float = math.inf
    ) -> Figures:
        """Return the memory and work of ``stage``; settings that do not touch it make no difference.

        Args:
            stage: one of :attr:`stages`.
            settings: knobs of the stage.
            timing: timing by which streamed weights are scheduled.
            most_copied: limit of bytes copied between device and host; beyond it the cost is of no use.

        Raises:
            TooManyCopiesError: more is copied; the trace stops there.
        """
        settings = acting(settings, stage)
        if not stage.repeats:
            settings = trim_buffer(settings, lambda: self.room(stage.component, settings))
        if stage.repeats and _streams(settings):
            settings = self._first_of_equal(stage, settings)
        workspaces = dataclasses.replace(self._overhead, context_bytes=0)
        called = self._call_facts[stage.name, stage.component]
        facts = settings, called, timing, tuple(allocator_settings()), workspaces, self._gpu, self._joins
        figures: list[Figures] = []

        def run_trace() -> Figures:
            traced = self.trace(stage, settings, timing, most_copied=most_copied)
            figures = {field.name: getattr(traced, field.name) for field in dataclasses.fields(Figures)}
            return Figures(**figures | ({} if stage.repeats and not _streams(settings) else {"spans": ()}))

        def try_trace() -> Tried:
            try:
                figures.append(run_trace())
            except TooManyCopiesError:
                return Tried(ended=True)
            return Tried(ended=False)

        def count() -> Figures:
            if most_copied < math.inf and self._cached(Tried, stage.component, (facts, most_copied), try_trace).ended:
                raise TooManyCopiesError("more is copied than was asked about")
            return figures[0] if figures else run_trace()

        return self._cached(_figures, stage.component, facts, count)

    def _first_of_equal(self, stage: Stage, settings: Settings) -> Settings:
        """Settings that were traced first, of those that place weights as ``settings`` do and cost the same in each
        module with all weights on the device: chunks of what another knob has cut change nothing.
        """
        placed = stage.name, stage.component, only(settings, Act.CONVERTS_WEIGHTS, Act.PLACES_WEIGHTS)
        resident = self(stage, without(settings, Act.PLACES_WEIGHTS))
        others = self._streamed.setdefault(placed, [])
        first = next((other for other, figures in others if figures == resident), None)
        if first is None:
            others.append((settings, resident))
        return first or settings

    def step(self, stage: Stage, settings: Settings, timing: StepTiming) -> Step:
        """A denoising step with weights streamed as ``settings`` say; the engine's own schedule costs no more.

        Args:
            stage: a stage that repeats.
            settings: with streamed weights.
            timing: timing of the stage with these settings.

        Returns:
            Seconds and bytes of one step.

        Raises:
            BudgetError: the device buffer cannot hold the largest block.
        """
        chosen = only(settings, Act.CONVERTS_WEIGHTS, Act.PLACES_WEIGHTS)
        resident = without(chosen, Act.PLACES_WEIGHTS)

        def count() -> Step:
            fake = self._fake.anatomy
            group = next(group for group in step_groups(fake, fake.components) if stage.component in group)
            with contextlib.ExitStack() as stack:
                for name in group:
                    stack.enter_context(self._fake.running(name, resident))
                layers, policy = self._fake.layers(group, resident), policy_of(chosen, True, timing)
                layout = lay_down(layers, policy, {}, near=True)
            streamed = sum(layout.blocks[number].bytes for number in layout.streamed)
            units, schedule = schedule_units(layout.blocks, timing), layout.schedule
            staying = layout.bytes - schedule.ring_bytes
            together = (unit.maps + room for unit, room in zip(units, schedule.rooms, strict=bool(schedule.rooms)))
            largest = max(staying, *(unit.bytes for unit in units)) if schedule.rooms else layout.bytes
            seconds = simulate(units, schedule, timing.copies)
            all_held = dataclasses.replace(timing.copies, disk=math.inf)
            return Step(
                seconds=seconds,
                device_bytes=layout.bytes,
                staying_bytes=staying,
                streamed_bytes=streamed,
                largest_bytes=largest,
                peak_bytes=staying + max(together) if schedule.rooms else 0,
                disk_bytes=timing.copies.disk_bytes(streamed),
                disk_wait=max(0.0, seconds - simulate(units, schedule, all_held)),
                first_wait=max(0.0, simulate_first(units, schedule, timing.copies) - seconds),
                fetches=len(schedule.fetches),
            )

        return self._cached(Step, stage.component, (chosen, timing), count)

    def trace(
        self,
        stage: Stage,
        settings: Settings,
        timing: StepTiming | None = None,
        whole: bool = False,
        most_copied: float = math.inf,
    ) -> MemoryTrace:
        """Trace ``stage``, with its timeline.

        Args:
            stage: one of :attr:`stages`.
            settings: knobs of the stage.
            timing: as in a call.
            whole: True to trace blocks that equal the block before them too.
            most_copied: as in a call.
        """
        settings = acting(settings, stage)
        key = stage.name, stage.component
        with self._name_errors(stage.component):
            fake = next(stage for stage in self._stages_of(self._fake.anatomy) if (stage.name, stage.component) == key)
        kernels = kernels_of("cpu" if self._device.type == "cpu" else "gpu")
        streams = _streams(settings)
        equals = {} if whole or stage.reads else self._fake.equals(stage.component)
        running = self._fake.running(stage.component, settings, timing)
        with self._name_errors(stage.component), assume_gpu(self._gpu), running, torch.no_grad(), kernels:
            again = stage.repeats and streams
            return trace_equals_once(
                fake.run, fake.inputs(), {}, equals, self._overhead, stage.repeats, again, most_copied, self._joins
            )

    @contextlib.contextmanager
    def _name_errors(self, name: str) -> Iterator[None]:
        """Add the component ``name`` to errors that the model raises within the block.

        Raises:
            PlanningError: the model raised an error that is neither ours nor out of memory.
        """
        try:
            yield
        except LowVRAMError:
            raise
        except Exception as error:
            if ran_out(error):
                raise
            shape, kind = self._shape, type(self._anatomy.components[name]).__name__
            what = f"{name} ({kind}) cannot be planned for {shape.width}x{shape.height}, batch {shape.batch}"
            message = " ".join(f"{type(error).__name__}: {error}".split())
            advice = "take off the hooks of other tools, or load the model again"
            raise PlanningError(f"{what}, as it raises {message}: {advice}") from error

    @functools.cached_property
    def _call_facts(self) -> dict[tuple[str, str], Any]:
        """Facts that a cost depends on in addition to the settings, by stage and component.

        They are shapes and types of the inputs, and the attention processors that the target sets for a run."""
        calls = {}
        for stage in self.stages:
            with torch.device("meta"):
                leaves = tree_flatten(stage.inputs())[0]
            shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
            processors = self._anatomy.processors if stage.component == self._anatomy.denoiser else {}
            kinds = tuple((path, type(processor).__qualname__) for path, processor in processors.items())
            facts = () if stage.facts is None else (stage.facts,)
            calls[stage.name, stage.component] = stage.name, shapes, kinds, *facts
        return calls

    def _cached(self, kind: Callable[..., _Kind], component: str, facts: Any, count: Callable[[], _Kind]) -> _Kind:
        """Result of ``count``, cached in memory and on disk.

        Args:
            kind: class of the result, made from its attributes.
            facts: everything that the result depends on, except component and device.
        """
        processor: tuple[Any, ...] = cpu_facts() if self._device.type == "cpu" else ()
        key: tuple[Any, ...] = kind.__name__, component, facts, *processor
        if key not in self._known:
            place = place_of("traces", lambda: (*key, self._fake.fingerprint(component), self._device.type))
            stored: _Kind | None = None
            with contextlib.suppress(TypeError):  # nothing is stored, or a result of another class
                stored = kind(**recall(place))
            if (
                stored is None
            ):  # outside the except block, or a broken model's own error would appear as its consequence
                with self._name_errors(component):
                    stored = count()
                remember(place, stored)
            self._known[key] = stored
        result: _Kind = self._known[key]
        return result


def _figures(spans: list[Any], **others: int) -> Figures:
    return Figures(spans=tuple(ModuleSpan(**span) for span in spans), **others)


def acting(settings: Settings, stage: Stage) -> Settings:
    """The knobs of ``settings`` that act in ``stage``, without those that run the same operators from a recording."""
    return without(settings.of_stage(stage.name), Act.REPLAYS)


def _streams(settings: Settings) -> bool:
    return Act.STREAMS_WEIGHTS in acts(settings)
