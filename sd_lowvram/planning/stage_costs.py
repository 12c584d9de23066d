"""What one stage costs with given settings: traced once on the model's twin, and remembered on disk."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from ..cache import cache_folder, code_digest, remember, remembered
from ..hooks.offload import STREAMED, policy_of, step_groups
from ..hooks.weight_storage import quantised_layers
from ..memory import kernels_of
from ..memory.accounts import unmark_host
from ..memory.threads import one_at_a_time
from ..models.anatomy import Anatomy
from ..settings import Settings
from ..streaming.layers import Layer, layers_of
from ..streaming.layout import Policy, lay_down
from ..streaming.search import near_schedule
from ..streaming.simulator import simulate
from ..streaming.timing import Timing, timed
from ..tracing import MemoryTrace
from ..tracing.equal_calls import equal_modules
from ..tracing.fake_model import Fitting, twin
from ..tracing.flop_counter import Span
from ..tracing.tracer import Figures, trace_equals_once
from ..weights import all_tensors, loaded_dtype, weight_bytes
from .stages import Shape, Stage, stages

_Kind = TypeVar("_Kind", "Cost", "Step", "Weights")


@dataclass(frozen=True)
class Cost(Figures):
    """The figures of one stage's trace.

    Attributes:
        spans: of a step of many, what each module does, in the order of the run; of a stage that runs once, nothing.
    """

    spans: tuple[Span, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not all(isinstance(span, Span) for span in self.spans):  # read from a file
            object.__setattr__(self, "spans", tuple(Span(**span) for span in self.spans))  # type: ignore[arg-type]

    @property
    def activation_bytes(self) -> int:
        """Most bytes on the device without weights."""
        return self.activation_peak_bytes + self.input_bytes

    @property
    def allocated_bytes(self) -> int:
        """Most bytes of inputs and what the stage makes, in both accounts: what a CPU's allocator sees."""
        return self.allocated_peak_bytes + self.input_bytes


@dataclass(frozen=True)
class Weights:
    """Bytes of one component's weights.

    Attributes:
        bytes: of all of them.
        largest_bytes: of the largest one.
        room_bytes: on the device when layers are streamed one at a time, the ring included; 0 for weights that are not.
    """

    bytes: int
    largest_bytes: int
    room_bytes: int


@dataclass(frozen=True)
class Step:
    """One call of a component whose weights are streamed, among many.

    Attributes:
        seconds: it takes, copies beside the compute.
        device_bytes: of weights on the device: what stays and the ring.
        staying_bytes: of weights that stay.
        streamed_bytes: of weights that are copied in every call.
    """

    seconds: float
    device_bytes: int
    staying_bytes: int
    streamed_bytes: int


class Costs:
    """Costs of the stages of one model for one shape, each traced when it is first asked for."""

    def __init__(self, anatomy: Anatomy, shape: Shape, encodes: bool, device: torch.device) -> None:
        self._anatomy = anatomy
        self._shape = shape
        self._device = device
        self._encodes = encodes
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.cache_enabled = False  # recipes take its place, and ask less
        self._known: dict[Any, Any] = {}
        self._fingerprints: dict[str, str] = {}
        self._layered: dict[Any, list[Layer]] = {}
        self._equals: dict[str, dict[nn.Module, int]] = {}

    def resized(self, shape: Shape) -> Costs:
        """The costs of the same model for another shape, with the same twin."""
        _ = self._fitting  # made now, once for both
        other = copy.copy(self)
        other._shape = shape
        for hangs_on_shape in ("stages", "_called"):
            vars(other).pop(hangs_on_shape, None)
        return other

    @functools.cached_property
    def _twin(self) -> Anatomy:
        with one_at_a_time():
            return twin(self._anatomy, self._mode)

    @functools.cached_property
    def _fitting(self) -> Fitting:
        return Fitting(self._twin, self._device)

    @functools.cached_property
    def stages(self) -> list[Stage]:
        return stages(self._anatomy, self._shape, self._encodes)

    def weights(self, component: str, settings: Settings) -> Weights:
        """The weights of a component in the precision and storage that ``settings`` ask for.

        Raises:
            ConflictError: they are to be streamed, and cannot be.
        """
        storage = settings.weight_storage if component in self.quantised else None
        chosen = Settings(precision=settings.precision, weight_storage=storage)
        if settings.offload in STREAMED:
            chosen = chosen.filled(offload="layer", split_layers=settings.split_layers)
        return self._of(Weights, component, "weights", chosen, lambda: self._weights_of(component, chosen))

    @functools.cached_property
    def quantised(self) -> frozenset[str]:
        """Components of which weights can be stored in 8 bits."""
        names = self._anatomy.components
        with one_at_a_time():
            return frozenset(name for name in names if quantised_layers(self._anatomy, name, as_loaded=True))

    def _weights_of(self, name: str, settings: Settings) -> Weights:
        component = self._twin.components[name]
        with self._mode, self._fitting.tried(name, dataclasses.replace(settings, offload=None, split_layers=None)):
            room = 0
            if settings.offload is not None:
                policy = Policy("layer", split=bool(settings.split_layers))
                room = lay_down(self._layers({name: component}, settings), policy, {}).bytes
            largest = max(map(_bytes, all_tensors(component)), default=0)
            return Weights(weight_bytes(component), largest, room)

    def __call__(self, stage: Stage, settings: Settings, whole: bool = False, timing: Timing | None = None) -> Cost:
        """The cost of ``stage``; settings that do not touch it make no difference.

        Args:
            whole: every block is traced, also one that equals the block before it; of weights that are streamed, all
                that comes and goes.
            timing: by which streamed weights are scheduled.
        """
        settings = settings.of_stage(stage.name)
        what = stage.name + (", whole" if whole else "") + (f", {_digest(timing)}" if timing else "")
        return self._of(Cost, stage.component, what, settings, lambda: self._trace(stage, settings, whole, timing))

    def step(self, stage: Stage, settings: Settings, timing: Timing) -> Step:
        """A denoising step with weights streamed as ``settings`` say; the engine's own schedule is no slower.

        Args:
            timing: of the stage with these settings.

        Raises:
            BudgetError: the room on the device cannot hold the largest block.
        """
        knobs = ("precision", "weight_storage", "channels_last", "offload", "weights_mib", "split_layers")
        chosen = Settings(**{name: getattr(settings, name) for name in knobs})
        what = f"{stage.name}, {_digest(timing)}"
        return self._of(Step, stage.component, what, chosen, lambda: self._step(stage, chosen, timing))

    def _step(self, stage: Stage, settings: Settings, timing: Timing) -> Step:
        group = next(one for one in step_groups(self._twin, self._twin.components) if stage.component in one)
        resident = dataclasses.replace(settings, offload=None, weights_mib=None, split_layers=None)
        with self._mode, contextlib.ExitStack() as stack:
            for name in group:
                stack.enter_context(self._fitting.tried(name, resident))
            layout = lay_down(
                self._layers(group, settings), policy_of(settings, True, timing), {}, search=near_schedule
            )
        streamed = sum(layout.blocks[number].bytes for number in layout.streamed)
        seconds = simulate(timed(layout.blocks, timing), layout.schedule, timing.copies)
        return Step(seconds, layout.bytes, layout.bytes - layout.schedule.ring_bytes, streamed)

    def _layers(self, components: Mapping[str, nn.Module], settings: Settings) -> list[Layer]:
        """The layers of components that wear ``settings``."""
        key = *components, settings.precision, settings.weight_storage
        if key not in self._layered:
            self._layered[key] = layers_of(components)
        return self._layered[key]

    def trace(self, stage: Stage, settings: Settings, whole: bool = True, timing: Timing | None = None) -> MemoryTrace:
        """The trace of ``stage``, its timeline included."""
        settings = settings.of_stage(stage.name)
        component = self._twin.components[stage.component]
        on_twin = next(
            twin_stage
            for twin_stage in stages(self._twin, self._shape, self._encodes)
            if (twin_stage.name, twin_stage.component) == (stage.name, stage.component)
        )
        kernels = kernels_of("cpu" if self._device.type == "cpu" else "gpu")
        with contextlib.ExitStack() as stack:
            ours = self._fitting.tried(stage.component, settings, timing)
            for context in (self._mode, torch.no_grad(), kernels, ours):
                stack.enter_context(context)
            stack.callback(_unmark, component)
            equals = {} if whole or settings.offload else self._equal(stage.component)
            return trace_equals_once(on_twin.run, on_twin.inputs(), {}, equals)

    def _equal(self, component: str) -> dict[nn.Module, int]:
        if component not in self._equals:
            self._equals[component] = equal_modules(self._twin.components[component])
        return self._equals[component]

    def _trace(self, stage: Stage, settings: Settings, whole: bool, timing: Timing | None) -> Cost:
        traced = self.trace(stage, settings, whole, timing)
        figures = {one.name: getattr(traced, one.name) for one in dataclasses.fields(Figures)}
        return Cost(**figures, spans=traced.spans if stage.repeats and not whole else ())

    def _of(self, kind: type[_Kind], component: str, what: str, settings: Settings, work: Callable[[], _Kind]) -> _Kind:
        """What ``work`` gives, remembered here and on disk."""
        key = component, what, settings, self._shape_of(what)
        if key not in self._known:
            place = self._place(component, what, settings)
            found = _remembered(place, kind)
            if found is None:
                found = work()
                remember(place, found)
            self._known[key] = found
        result: _Kind = self._known[key]
        return result

    def _shape_of(self, what: str) -> Shape | None:
        """The shape that this hangs on."""
        return None if what.startswith(("text", "weights")) else self._shape

    def _given(self, component: str, what: str) -> tuple[Any, ...]:
        """What the stage is called with, and what the target does to its denoiser for a run."""
        processors = self._anatomy.processors if component == self._anatomy.denoiser else {}
        called = self._called.get((what.partition(",")[0], component), ())
        return called, tuple((path, type(one).__qualname__) for path, one in processors.items())

    @functools.cached_property
    def _called(self) -> dict[tuple[str, str], tuple[Any, ...]]:
        """By stage and component, the shapes and types of what they are called with."""
        with torch.device("meta"):
            leaves = {(one.name, one.component): tree_flatten(one.inputs())[0] for one in self.stages}
        return {
            key: tuple((tuple(leaf.shape), leaf.dtype) for leaf in found if isinstance(leaf, torch.Tensor))
            for key, found in leaves.items()
        }

    def _kind(self, component: str) -> str:
        if component not in self._fingerprints:
            with one_at_a_time():
                self._fingerprints[component] = _fingerprint(self._anatomy.components[component])
        return self._fingerprints[component]

    def _place(self, component: str, what: str, settings: Settings) -> Path | None:
        """The file in which this is remembered; None: nowhere."""
        folder = cache_folder()
        if folder is None:
            return None
        facts = (
            self._kind(component),
            what,
            self._shape_of(what),
            self._given(component, what),
            self._device.type,
            settings,
            code_digest(),
        )
        return folder / "traces" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"


def _unmark(component: nn.Module) -> None:
    """Weights of the twin that were streamed in a trace are on the device again for the next one."""
    for tensor in all_tensors(component):
        unmark_host(tensor)


@functools.lru_cache
def _digest(timing: Timing) -> str:
    return hashlib.sha256(repr(timing).encode()).hexdigest()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fingerprint(component: nn.Module) -> str:
    """Of classes, shapes and types, not of the weights' values."""
    parts: list[Any] = [type(module).__qualname__ for module in component.modules()]
    parts += [(tuple(tensor.shape), str(loaded_dtype(tensor)), tensor.stride()) for tensor in all_tensors(component)]
    config = getattr(component, "config", None)
    if isinstance(config, Mapping):  # diffusers also notes there what was left out, in an order that chance gives
        config = sorted((name, repr(value)) for name, value in config.items() if not name.startswith("_"))
    parts.append(repr(config))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _remembered(place: Path | None, kind: type[_Kind]) -> _Kind | None:
    try:
        return kind(**remembered(place))
    except TypeError:  # nothing, or something else
        return None
