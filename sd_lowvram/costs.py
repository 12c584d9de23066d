"""What one stage costs with given settings: traced once on the model's twin, and remembered on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .memory import MemoryTrace, kernels_of, trace
from .models.anatomy import Anatomy
from .session import attached
from .settings import Settings
from .stages import Shape, Stage, stages
from .twins import twin
from .weights import all_tensors, weight_bytes


@dataclass(frozen=True)
class Cost:
    """Bytes and work of one stage.

    Attributes:
        peak_bytes: most bytes on the device, of this stage's own component and what it makes.
        activation_bytes: the same without weights.
        host_bytes: most bytes that wait in host memory.
        largest_bytes: the largest single allocation.
        allocated_bytes: most bytes of inputs and what the stage makes, in both accounts: what a CPU's allocator sees.
        flops: floating-point operations of matrix products and convolutions.
        moved_bytes: read and written by all operators.
        copied_bytes: crossing between device and host memory.
        operators: how many ran.
    """

    peak_bytes: int
    activation_bytes: int
    host_bytes: int
    largest_bytes: int
    allocated_bytes: int
    flops: int
    moved_bytes: int
    copied_bytes: int
    operators: int


class Costs:
    """Costs of the stages of one model for one shape, each traced when it is first asked for."""

    def __init__(self, anatomy: Anatomy, shape: Shape, encodes: bool, device: torch.device) -> None:
        self._anatomy = anatomy
        self._shape = shape
        self._device = device
        self._encodes = encodes
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[tuple[str, Settings], Cost] = {}
        self._weights: dict[str | None, dict[str, tuple[int, int]]] = {}
        self._fingerprints: dict[str, str] = {}

    @functools.cached_property
    def _twin(self) -> Anatomy:
        return twin(self._anatomy, self._mode)

    @functools.cached_property
    def stages(self) -> list[Stage]:
        return stages(self._anatomy, self._shape, self._encodes)

    def weights(self, precision: str | None) -> dict[str, int]:
        """Bytes of each component's weights in ``precision``."""
        return {name: size for name, (size, _) in self._sizes(precision).items()}

    def largest_weight(self, precision: str | None, component: str) -> int:
        """Bytes of the largest weight of ``component`` in ``precision``."""
        return self._sizes(precision)[component][1]

    def _sizes(self, precision: str | None) -> dict[str, tuple[int, int]]:
        """Of each component all weights' bytes, and the largest one's."""
        if precision not in self._weights:
            components = self._twin.components
            with self._mode, contextlib.ExitStack() as stack:
                if precision is not None:
                    for component in components.values():
                        stack.enter_context(attached(component, Settings(precision=precision), device=self._device))
                self._weights[precision] = {
                    name: (weight_bytes(component), max(map(_bytes, all_tensors(component)), default=0))
                    for name, component in components.items()
                }
        return self._weights[precision]

    def __call__(self, stage: Stage, settings: Settings) -> Cost:
        """The cost of ``stage``; settings that do not touch it make no difference."""
        settings = relevant(stage.name, settings)
        key = stage.component if stage.name == "text" else stage.name, settings
        if key not in self._known:
            place = self._place(stage, settings)
            self._known[key] = _remembered(place) or self._trace(stage, settings, place)
        return self._known[key]

    def trace(self, stage: Stage, settings: Settings) -> MemoryTrace:
        """The whole trace of ``stage``, its timeline included."""
        settings = relevant(stage.name, settings)
        component = self._twin.components[stage.component]
        on_twin = next(
            twin_stage
            for twin_stage in stages(self._twin, self._shape, self._encodes)
            if (twin_stage.name, twin_stage.component) == (stage.name, stage.component)
        )
        kernels = kernels_of("cpu" if self._device.type == "cpu" else "gpu")
        with self._mode, torch.no_grad(), kernels, attached(component, settings, device=self._device):
            return trace(on_twin.run, *on_twin.inputs())

    def _trace(self, stage: Stage, settings: Settings, place: Path | None) -> Cost:
        traced = self.trace(stage, settings)
        cost = Cost(
            peak_bytes=traced.peak_bytes,
            activation_bytes=traced.activation_peak_bytes + traced.input_bytes,
            host_bytes=traced.host_peak_bytes,
            largest_bytes=traced.largest_bytes,
            allocated_bytes=traced.allocated_peak_bytes + traced.input_bytes,
            flops=traced.flops,
            moved_bytes=traced.moved_bytes,
            copied_bytes=traced.copied_bytes,
            operators=traced.operators,
        )
        _remember(place, cost)
        return cost

    def _place(self, stage: Stage, settings: Settings) -> Path | None:
        """The file in which this cost is remembered; None: nowhere."""
        folder = cache_folder()
        if folder is None:
            return None
        if stage.component not in self._fingerprints:
            self._fingerprints[stage.component] = _fingerprint(self._anatomy.components[stage.component])
        facts = (self._fingerprints[stage.component], stage.name, self._shape, self._device.type, settings, _code())
        return folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"


_STAGES = {
    "vae": ("decode", "encode"),
    "decoder": ("decode", "encode"),
    "attention": ("denoise", "decode", "encode"),
    "channels": ("denoise", "decode", "encode"),
    "deterministic": ("denoise", "decode", "encode"),
    "feed": ("denoise",),
    "residual": ("denoise",),
    "park": ("denoise",),
    "guidance": ("denoise",),
    "transformer": ("denoise",),
}


def relevant(stage: str, settings: Settings) -> Settings:
    """``settings`` without the knobs that do not touch ``stage``, told by the first word of their names."""
    foreign = {
        name: None for name, _, _ in settings.decided() if stage not in _STAGES.get(name.split("_")[0], (stage,))
    }
    return dataclasses.replace(settings, **foreign)


def cache_folder() -> Path | None:
    """Where traces are remembered: SD_LOWVRAM_CACHE, or the user's cache folder; None when the former is empty."""
    named = os.environ.get("SD_LOWVRAM_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sd-lowvram" / "traces"


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fingerprint(component: nn.Module) -> str:
    """Of classes, shapes and types, not of the weights' values."""
    parts: list[Any] = [type(module).__qualname__ for module in component.modules()]
    parts += [(tuple(tensor.shape), str(tensor.dtype), tensor.stride()) for tensor in all_tensors(component)]
    config = getattr(component, "config", None)
    parts.append(repr(config))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _code() -> str:
    """Changes when torch, the host's library or our own code does."""
    import importlib.metadata

    digest = hashlib.sha256(torch.__version__.encode())
    for package in ("diffusers", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(package).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _remembered(place: Path | None) -> Cost | None:
    try:
        return Cost(**json.loads(place.read_text(encoding="ascii"))) if place else None
    except (OSError, ValueError, TypeError):
        return None


def _remember(place: Path | None, cost: Cost) -> None:
    if place is None:
        return
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="ascii") as file:
            json.dump(dataclasses.asdict(cost), file)
        os.replace(file.name, place)
