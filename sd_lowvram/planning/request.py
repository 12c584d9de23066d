"""What is asked of the planner, and the one place that makes it from what a person states."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from ..devices.info import available_ram, default_device, free_vram
from ..devices.overhead import NONE, Overhead
from ..devices.performance import THIS, Rates
from ..devices.this_machine import budget_of, overhead_of, rates_of
from ..errors import BadInputError
from ..memory.pinned import unlock_ended
from ..models.anatomy import Anatomy
from ..streaming.host_weights import mapped_bytes
from ..weights import all_tensors
from .stages import Shape, native_size, scale_factor

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_STEPS = 30


@dataclass(frozen=True)
class Request:
    """What is asked for: pixels, pictures, bytes of device and host memory, the device and its rates.

    Attributes:
        passes: rows of the denoiser's batch for each picture: 1 without guidance, 2 with it, 3 where a pipeline guides
            by text and picture.
        encodes: whether the run starts from a picture.
        pictures: that will be made by the plan in all: what a first one takes longer is shared among them.
        calls: of the denoiser in each step.
        frames: of latents that the autoencoder decodes together; a picture is one.
        disk: bytes a second of the disk under the weights' files; None: as measured here, if it comes to that.
    """

    width: int
    height: int
    batch: int
    vram: int
    ram: int
    device: torch.device
    rates: Rates
    steps: int = DEFAULT_STEPS
    passes: int = 2
    encodes: bool = False
    pictures: int = 1
    calls: int = 1
    frames: int = 1
    disk: float | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.width, self.height, self.batch, self.passes, self.frames)

    @property
    def overhead(self) -> Overhead:
        """What the device needs besides tensors: the machine's own, unless the plan is for another one."""
        if self.device.type != "cuda":
            return NONE
        here = self.rates.name == THIS and torch.cuda.is_available()
        return overhead_of(self.device) if here else Overhead()

    @property
    def overhead_bytes(self) -> int:
        return self.overhead.context_bytes


@dataclass
class Budget:
    """Bytes that a plan must keep to.

    Attributes:
        alike: the least and the most bytes, both included, with which all that was asked would be answered the same.
    """

    bytes: int
    alike: tuple[float, float] = (0, math.inf)

    def holds(self, needed: int) -> bool:
        """Whether ``needed`` bytes are within it."""
        least, most = self.alike
        answer = needed <= self.bytes
        self.alike = (max(least, needed), most) if answer else (least, min(most, needed - 1))
        return answer


class RunOptions(TypedDict, total=False):
    """What a caller states of a run; what is left out, or None, is as the target itself runs, or what is free.

    Attributes:
        vram, ram: bytes, on a GPU those of the driver's context included; None: what this process can have now, the
            weights that lie there already counted as free.
        width, height: of the picture in pixels; None: the model's own size.
        batch: pictures at a time; 1.
        steps: of denoising.
        pictures: in all; 1.
        frames: of latents, where the autoencoder decodes several together; 1.
        passes, encodes: None: as the target itself runs.
        device: None: a GPU when there is one, else the CPU.
        rates: None: those of this machine.
        disk: bytes a second of the disk under the weights' files; None: of this machine's.
    """

    vram: int | None
    ram: int | None
    width: int | None
    height: int | None
    batch: int
    steps: int
    pictures: int
    frames: int
    passes: int | None
    encodes: bool | None
    device: torch.device | str | None
    rates: Rates | None
    disk: float | None


def request_for(anatomy: Anatomy, **options: Unpack[RunOptions]) -> Request:
    """The request for a run of ``anatomy``'s models.

    Args:
        options: fields of :class:`RunOptions`; those that lack are the model's own, or what is free now.

    Raises:
        BadInputError: a size or a number that cannot be used.
    """
    if unknown := options.keys() - RunOptions.__annotations__.keys():
        raise TypeError(f"a run has no {', '.join(sorted(unknown))}")

    def stated(name: str, otherwise: Callable[[], Any]) -> Any:
        value = options.get(name)
        return otherwise() if value is None else value

    width, height = (stated(name, lambda: native_size(anatomy)) for name in ("width", "height"))
    batch, pictures, steps = options.get("batch", 1), options.get("pictures", 1), options.get("steps", DEFAULT_STEPS)
    check_size(width, height, batch, scale_factor(anatomy) * anatomy.family.latent_multiple)
    check_count("steps", steps)
    check_count("pictures", pictures)
    where = torch.device(stated("device", default_device))
    unlock_ended()  # of models that have gone: that memory is free
    return Request(
        width=width,
        height=height,
        batch=batch,
        vram=stated("vram", lambda: budget_of(where, free_vram(where) + _held(anatomy, where))),
        ram=stated("ram", lambda: available_ram() + _held(anatomy, torch.device("cpu"))),
        device=where,
        rates=stated("rates", lambda: rates_of(where)),
        steps=steps,
        passes=stated("passes", lambda: anatomy.passes),
        encodes=stated("encodes", lambda: anatomy.encodes),
        pictures=max(pictures, batch),
        calls=anatomy.calls,
        frames=options.get("frames", 1),
        disk=options.get("disk"),
    )


def check_size(width: int, height: int, batch: int = 1, factor: int = 8) -> None:
    """Raise BadInputError unless the picture's sides are positive multiples of ``factor``; says what is nearest."""
    for name, pixels in (("width", width), ("height", height)):
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < factor or pixels % factor:
            near = f": the nearest is {max(factor, factor * round(pixels / factor))}" if isinstance(pixels, int) else ""
            raise BadInputError(f"{name} {pixels!r} must be a positive multiple of {factor}{near}")
    check_count("batch", batch)


def check_count(name: str, count: int) -> None:
    """Raise BadInputError unless ``count`` of what ``name`` says is a whole number of at least 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInputError(f"{name} {count!r} must be a whole number of at least 1")


def _held(anatomy: Anatomy, device: torch.device) -> int:
    """Bytes of weights that lie in the memory of ``device`` already: a plan counts them too, so they are free to it."""
    components = anatomy.components.values()
    here = [tensor for tensor in all_tensors(*components) if tensor.device.type == device.type]
    mapped = mapped_bytes(*components) if device.type == "cpu" else 0
    return max(0, sum(tensor.numel() * tensor.element_size() for tensor in here) - mapped)
