"""Requests to the planner, and the one place that makes them from a user's input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from ..devices.info import available_ram, default_device, free_vram
from ..devices.overhead import NONE, Overhead
from ..devices.performance import THIS, Rates
from ..devices.this_machine import budget_of, overhead_of, rates_of
from ..errors import BadInputError
from ..kernels.attention.problem import PlannedGpu
from ..memory.pinned import unlock_ended
from ..models.anatomy import Anatomy
from ..models.calls import Shape
from ..models.latents import native_size, scale_factor
from ..models.recorded import Rehearsal
from ..policies import OURS, Pace
from ..streaming.host_weights import mapped_bytes
from ..weights import all_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_STEPS = 30


@dataclass(frozen=True)
class Request:
    """A request: size, number of pictures, bytes of device and host memory, the device and its rates.

    Attributes:
        passes: rows of the denoiser's batch for each picture: 1 without guidance, 2 with it, 3 if a pipeline guides by
            text and picture.
        encodes: True if the run starts from a picture.
        pictures: number of pictures that the plan will make; the extra time of the first is shared among them.
        calls: calls of the denoiser in each step.
        frames: frames of latents that the autoencoder decodes together; 1 for a picture.
        disk: bytes a second of the disk under the weights' files; None: measured here if it is needed.
        pace: of the program that runs it.
        rehearsal: the calls of the pipeline, if its own call was rehearsed.
        fills: True if spare bytes of ``vram`` hold streamed weights: the user stated this budget.
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
    pace: Pace = OURS
    rehearsal: Rehearsal | None = field(default=None, repr=False)
    fills: bool = False

    @property
    def shape(self) -> Shape:
        """Shape of the picture, for traces."""
        return Shape(self.width, self.height, self.batch, self.passes, self.frames)

    @property
    def gpu(self) -> PlannedGpu:
        return PlannedGpu(self.rates.bf16, self.rates.name == THIS)

    @property
    def overhead(self) -> Overhead:
        """Bytes that the device needs in addition to tensors, on this machine or on the planned one."""
        if self.device.type != "cuda":
            return NONE
        here = self.rates.name == THIS and torch.cuda.is_available()
        return overhead_of(self.device) if here else Overhead()

    @property
    def overhead_bytes(self) -> int:
        """Bytes of the driver's context."""
        return self.overhead.context_bytes


@dataclass
class Budget:
    """The bytes that a plan may use.

    Attributes:
        alike: budgets in this interval give the same answer to every ``holds()`` call so far (plan-cache key).
    """

    bytes: int
    alike: tuple[float, float] = (0, math.inf)

    def holds(self, needed: int) -> bool:
        """Return True if ``needed`` bytes are within the budget, and narrow ``alike`` by the answer."""
        least, most = self.alike
        answer = needed <= self.bytes
        self.alike = (max(least, needed), most) if answer else (least, min(most, needed - 1))
        return answer


class RunOptions(TypedDict, total=False):
    """Options of a run. A missing option, or None, means the target's own value, or what is free.

    Attributes:
        vram, ram: bytes, including the driver's context on a GPU; None: what this process can use now, with the model's
            weights on the device counted as free.
        width, height: size of the picture in pixels; None: the model's own size.
        batch: pictures at a time; 1.
        steps: denoising steps.
        pictures: number of pictures in all; 1.
        frames: frames of latents that the autoencoder decodes together; 1.
        passes, encodes: None: as the target itself runs.
        device: None: a GPU if there is one, else the CPU.
        rates: None: those of this machine.
        disk: bytes a second of the disk under the weights' files; None: measured on this machine.
        pace: of the program that runs it; that of this one.
        fills: False if ``vram`` was not stated by the user; by default the budget is filled if ``vram`` is given.
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
    pace: Pace
    fills: bool


def request_for(anatomy: Anatomy, **options: Unpack[RunOptions]) -> Request:
    """The request for a run of ``anatomy``'s models.

    Args:
        options: fields of :class:`RunOptions`; those that lack are the model's own, or what is free now.

    Raises:
        BadInputError: a size or a number that cannot be used.
    """
    if unknown := options.keys() - RunOptions.__annotations__.keys():
        raise TypeError(f"a run has no {', '.join(sorted(unknown))}")

    def option(name: str, otherwise: Callable[[], Any]) -> Any:
        value = options.get(name)
        return otherwise() if value is None else value

    made = anatomy.rehearsal.size if anatomy.rehearsal is not None else None
    width = option("width", lambda: made[1] if made else native_size(anatomy))
    height = option("height", lambda: made[0] if made else native_size(anatomy))
    batch, pictures, steps = options.get("batch", 1), options.get("pictures", 1), options.get("steps", DEFAULT_STEPS)
    rehearsal = anatomy.rehearsal  # it was refused by the pipeline itself, if the size is none of its
    check_size(width, height, batch, 1 if rehearsal else scale_factor(anatomy) * anatomy.family.latent_multiple)
    check_count("steps", steps)
    check_count("pictures", pictures)
    where = torch.device(option("device", default_device))
    unlock_ended()  # pages of models that no longer exist count as free
    return Request(
        width=width,
        height=height,
        batch=batch,
        vram=option("vram", lambda: budget_of(where, free_vram(where) + _resident_bytes(anatomy, where))),
        ram=option("ram", lambda: available_ram() + _resident_bytes(anatomy, torch.device("cpu"))),
        device=where,
        rates=option("rates", lambda: rates_of(where)),
        steps=steps,
        passes=option("passes", lambda: anatomy.passes),
        encodes=option("encodes", lambda: anatomy.encodes),
        pictures=max(pictures, batch),
        calls=anatomy.calls,
        rehearsal=rehearsal,
        frames=options.get("frames", 1),
        disk=options.get("disk"),
        pace=options.get("pace", OURS),
        fills=where.type != "cpu" and options.get("fills", options.get("vram") is not None),
    )


def check_size(width: int, height: int, batch: int = 1, factor: int = 8) -> None:
    """Raise BadInputError unless the picture can be planned; the message names the nearest size.

    Args:
        width, height: in pixels; positive multiples of ``factor``.
        batch: pictures at a time, at least 1.
        factor: pixels of the picture for one of the latents.

    Raises:
        BadInputError: a side or the batch cannot be used.
    """
    for name, pixels in (("width", width), ("height", height)):
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < factor or pixels % factor:
            near = f": the nearest is {max(factor, factor * round(pixels / factor))}" if isinstance(pixels, int) else ""
            raise BadInputError(f"{name} {pixels!r} must be a positive multiple of {factor}{near}")
    check_count("batch", batch)


def check_count(name: str, count: int) -> None:
    """Raise BadInputError unless ``count`` is a whole number of at least 1; ``name`` is the option in the message.

    Raises:
        BadInputError: it is not.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInputError(f"{name} {count!r} must be a whole number of at least 1")


def _resident_bytes(anatomy: Anatomy, device: torch.device) -> int:
    """Bytes of weights that lie in the memory of ``device`` already: a plan counts them too, so they are free to it."""
    components = anatomy.components.values()
    here = [tensor for tensor in all_tensors(*components) if tensor.device.type == device.type]
    mapped = mapped_bytes(*components) if device.type == "cpu" else 0
    return max(0, sum(tensor.numel() * tensor.element_size() for tensor in here) - mapped)
