"""Several UNets in one run, after A-SDM (2023): a small one for some steps, the whole one for the rest.

The run is one trajectory of one scheduler. Between two steps the pipeline's UNet is replaced by the next one, with the
hooks of its own plan: one of them is on the device, the rest is in host memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..api import Size, anatomy_for_call, attach_plan
from ..errors import BadInputError, BudgetError
from ..knob import Act
from ..patches import set_patch, wrap
from ..planning.plan import Plan
from ..planning.request import Request, RunOptions, request_for
from ..planning.search import make_plan
from ..session import anatomy_of, attachments, restore
from ..settings import Fidelity, Settings
from ..units import format_size, parse_size
from ..weights import all_tensors
from .layers import check_unet
from .merged import merge_plans

Part = tuple[Any, int]
"""A UNet, and how many steps it takes."""


@dataclass
class _Turn:
    """A UNet's steps.

    Attributes:
        plan: by which the UNet runs: a leaner one, or one for another size, where its last steps came to that.
    """

    unet: Any
    steps: int
    plan: Plan


@contextlib.contextmanager
def scheduled(
    pipe: Any,
    parts: Sequence[Part],
    *,
    vram: Size | None = None,
    ram: Size | None = None,
    width: int | None = None,
    height: int | None = None,
    batch: int = 1,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
    approximate: bool = False,
) -> Iterator[Plan]:
    """Run ``pipe`` with the UNets of ``parts`` one after the other within the block, each by its own plan in one
    budget::

        with scheduled(pipe, [(small, 10), (pipe.unet, 15)], vram="4GB") as plan:
            image = pipe("a red apple", num_inference_steps=25).images[0]

    Afterwards the pipeline has its own UNet again and no hooks, bit for bit. Fidelity: ``bitwise`` if the own UNet runs
    all steps; another UNet draws another picture. If the device runs out of memory, the UNet's plan falls back to less
    memory, as with :func:`sd_lowvram.optimize`, for the rest of the block.

    Args:
        pipe: a diffusers pipeline of SD1.x, SD2.x or SDXL that starts from noise.
        parts: UNets on the CPU, with their numbers of steps, in order; a UNet may occur again. Every run in the block
            must have the sum of these steps.
        vram, ram, width, height, batch, device, settings, approximate: as for :func:`sd_lowvram.optimize`. Waiting
        UNets
            count against a stated ``ram``.

    Returns:
        The plan of the whole run: for each stage the maximum over the UNets.

    Raises:
        BadInputError: no parts, fewer than one step, UNets that do not match, settings that store results for the next
            UNet (``deep_cache``, ``cuda_graphs``), a pipeline that starts from a picture, or, when a run begins,
            another number of steps.
        BudgetError: one of the UNets does not fit.
    """
    fixed = settings or Settings()
    check_parts(pipe, parts)
    check_settings(fixed)
    if len({id(unet) for unet, _ in parts}) > 1:  # nor does a plan choose by itself what is refused
        fixed = fixed.filled(cuda_graphs=False)
    own = pipe.unet
    restore(pipe)
    run: RunOptions = {"width": width, "height": height, "batch": batch, "device": device}
    with _put_back(pipe, own):
        requests = [_request(pipe, part, parts, vram, ram, run) for part in parts]
        turns = []
        for (unet, steps), request in zip(parts, requests, strict=True):
            pipe.register_modules(unet=unet)
            planned = make_plan(anatomy_of(pipe, rehearsal=request.rehearsal), request, fixed, approximate)
            turns.append(_Turn(unet, steps, planned))
        plan = merge_plans([turn.plan for turn in turns], [_waiting(unet, parts) for unet, _ in parts])
        if any(unet is not own for unet, _ in parts):
            plan = dataclasses.replace(plan, fidelity=Fidelity.APPROXIMATE)
        following = _Following(turns, functools.partial(_change, pipe, fixed, approximate))
        following.take(0)
        with contextlib.ExitStack() as stack:
            for entry, around in (("set_timesteps", following.begin), ("step", following.after_step)):
                stack.callback(set_patch(wrap(pipe.scheduler, entry, around, "unet schedule")))
            yield plan


@contextlib.contextmanager
def _put_back(pipe: Any, own: Any) -> Iterator[None]:
    try:
        yield
    finally:
        restore(pipe)
        pipe.register_modules(unet=own)


def _change(pipe: Any, settings: Settings, approximate: bool, old: _Turn | None, new: _Turn) -> None:
    """Put the UNet of ``new`` and the hooks of its plan in place of those of ``old``, which leave first."""
    if old is not None:
        old.plan = next((attachment.plan for attachment in reversed(attachments(pipe)) if attachment.plan), old.plan)
    restore(pipe)
    pipe.register_modules(unet=new.unet)
    attach_plan(pipe, new.plan, settings, approximate)


class _Following:
    """Counts a scheduler's steps, and gives each turn to its UNet between two of them."""

    def __init__(self, turns: Sequence[_Turn], change: Callable[[_Turn | None, _Turn], None]) -> None:
        self._turns = turns
        self._change = change
        self._of_step = [number for number, turn in enumerate(turns) for _ in range(turn.steps)]
        self._now: int | None = None
        self._calls = self._total = 0

    def take(self, number: int) -> None:
        if number != self._now:
            old = None if self._now is None else self._turns[self._now]
            self._now = None  # where it fails, nothing is on
            self._change(old, self._turns[number])
            self._now = number

    def begin(self, original: Callable[..., Any], steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
        steps = kwargs.pop("num_inference_steps", steps)
        if steps != len(self._of_step):
            raise BadInputError(
                f"the UNets' steps add up to {len(self._of_step)} and the run has {steps}: give it num_inference_steps="
                f"{len(self._of_step)}"
            )
        result = original(steps, *args, **kwargs)
        self._calls = 0
        self._total = len(original.__self__.timesteps)  # type: ignore[attr-defined]
        self.take(0)
        return result

    def after_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._calls += 1
        if self._calls < self._total:
            # Some schedulers ask twice a step, all but the last (heun), or twice for the first (plms).
            self.take(self._of_step[self._calls * len(self._of_step) // self._total])
        return result


def _request(
    pipe: Any, part: Part, parts: Sequence[Part], vram: Size | None, ram: Size | None, run: RunOptions
) -> Request:
    """Request for the turn of ``part``, within the budget less the waiting UNets."""
    unet, steps = part
    pipe.register_modules(unet=unet)
    left = None
    if ram is not None:
        waiting = _waiting(unet, parts)
        left = parse_size(ram, "ram") - waiting
        if left <= 0:
            raise BudgetError(
                f"ram {format_size(left + waiting)} cannot hold the UNets that wait for their turn, which take "
                f"{format_size(waiting)}: raise it, or leave it out",
                needed_bytes=waiting, stage="denoise", limit="ram", by_size=False,
            )  # fmt: skip
    run = {**run, "vram": None if vram is None else parse_size(vram, "vram"), "ram": left, "steps": steps}
    return request_for(anatomy_for_call(pipe, None, run, guided=True, call=None), **run)


def _waiting(unet: Any, parts: Sequence[Part]) -> int:
    """Bytes of the other UNets while ``unet`` has its turn."""
    waiting_unets = {id(other): other for other, _ in parts if other is not unet}
    return sum(tensor.numel() * tensor.element_size() for tensor in all_tensors(*waiting_unets.values()))


_ALIKE = (
    *("in_channels", "out_channels", "cross_attention_dim", "prediction_type", "encoder_hid_dim_type"),
    *("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim"),
    *("class_embed_type", "time_cond_proj_dim"),
)
"""Settings of a UNet's inputs and outputs, which must be equal; layers and native size may differ."""


def check_match(own: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Check that two UNets can take turns in one run.

    Args:
        own, other: their configurations.
        names: what to call them in the error.

    Raises:
        BadInputError: their inputs or outputs differ.
    """
    for key in _ALIKE:
        first, second = _width(own.get(key)), _width(other.get(key))
        if first != second:
            raise BadInputError(
                f"the UNets {names[0]} and {names[1]} do not match: {key} is {first} in {names[0]} and {second} in "
                f"{names[1]}; take UNets that were cut from one model"
            )


def _width(value: Any) -> Any:
    """A width that is given block by block, of which a smaller UNet has fewer, as one where it is one."""
    return value[0] if isinstance(value, (list, tuple)) and len({*value}) == 1 else value


def check_parts(pipe: Any, parts: Sequence[Part]) -> None:
    """Check that UNets can take turns in ``pipe``.

    Args:
        pipe: the pipeline.
        parts: UNets with their numbers of steps.

    Raises:
        BadInputError: a UNet does not match, or a number of steps cannot be used.
    """
    if not parts:
        raise BadInputError("a schedule of UNets needs at least one (UNet, steps)")
    check_unet(getattr(pipe, "unet", None))
    if anatomy_of(pipe).encodes:
        raise BadInputError(
            f"{type(pipe).__name__} starts from a picture and leaves steps out: a schedule of UNets is for runs that "
            "start from noise"
        )
    for unet, steps in parts:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise BadInputError(f"{steps!r} steps of a UNet must be a whole number of at least 1")
        check_unet(unet)
        check_match(pipe.unet.config, unet.config, ("of the pipeline", "of the schedule"))
        if unet.dtype != pipe.unet.dtype:
            raise BadInputError(f"a UNet of the schedule is in {unet.dtype} and the pipeline's in {pipe.unet.dtype}")


def check_settings(settings: Settings) -> None:
    """Raise BadInputError if ``settings`` request something that stores one UNet's results for the next step."""
    for name, knob, value in settings.decided():
        if Act.SKIPS_LAYERS in knob.acts_of(value):
            raise BadInputError(
                f"{name}={value} and a schedule of UNets exclude each other: deep features of one UNet are none of the "
                "other's"
            )
    if settings.cuda_graphs:
        raise BadInputError(
            "cuda_graphs and a schedule of UNets exclude each other: what is recorded of a UNet lies on the device "
            "while another has its turn"
        )
