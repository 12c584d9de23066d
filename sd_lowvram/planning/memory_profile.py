"""A run recorded stage by stage: seconds and peak bytes as the allocator saw them, not as a trace found them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat.private import storage_key
from ..devices.support import check_measuring
from ..memory.measured import allocator_events, allocator_profile
from ..memory.storage_refs import Deaths
from ..models.anatomy import Anatomy
from ..models.calls import CONTROL, CONTROL_STAGE, TEXT_STAGE
from ..patches import set_patch, wrap
from ..session import anatomy_of, attachments
from ..units import MIB, format_size
from ..weights import all_tensors

_POINTS = 240
"""Points of a stage's curve: more than a plot of it shows."""


@dataclass(frozen=True)
class MeasuredStage:
    """A measured stage of a run; each denoising step is a stage of its own.

    Attributes:
        name, component: as in the plan's stages; for a model that no plan knows, its name twice.
        seconds: from the call of the component to the call of the next.
        peak_bytes: the most bytes of live tensors, including those that existed before.
        curve: (seconds since the stage began, bytes); empty on a GPU.
        reserved_bytes: the most bytes that the allocator reserved on a GPU; 0 on a CPU.
    """

    name: str
    component: str
    seconds: float
    peak_bytes: int
    curve: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    reserved_bytes: int = 0


@dataclass
class MeasuredRun:
    """The result of :func:`measured`, complete when its block ends.

    Attributes:
        stages: in the order in which they ran. Work before the first stage belongs to it.
    """

    stages: tuple[MeasuredStage, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes of tensors in any stage."""
        return max((stage.peak_bytes for stage in self.stages), default=0)

    @property
    def reserved_bytes(self) -> int:
        """Most bytes that the allocator reserved in any stage; 0 on a CPU."""
        return max((stage.reserved_bytes for stage in self.stages), default=0)

    @property
    def seconds(self) -> float:
        """Seconds of all stages together."""
        return sum(stage.seconds for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the curves."""
        keys = ("name", "component", "seconds", "peak_bytes", "reserved_bytes")
        stages = [{key: getattr(stage, key) for key in keys} for stage in self.stages]
        whole = {"peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes}
        return {**whole, "seconds": self.seconds, "stages": stages}


def overrun(plan: Any, run: MeasuredRun) -> str | None:
    """A sentence on what ``run`` reserved beyond the budget of ``plan``, or on the stage in which it allocated the most
    beyond ``plan``; None if it did neither.

    An excess of allocated bytes of up to 1 % or 8 MiB, whichever is more, is allowed. On a CPU the allocator counts
    host memory too, so planned host bytes are added.

    Args:
        plan: the plan that was attached.
        run: what was measured.
    """
    passed = budget_passed(run.reserved_bytes, plan)
    if passed:
        return passed
    on_cpu = plan.request.device.type == "cpu"
    planned = {(stage.name, stage.component): stage.held_bytes if on_cpu else stage.peak_bytes for stage in plan.stages}
    planned_stages = [stage for stage in run.stages if (stage.name, stage.component) in planned]
    if not planned_stages:
        return None
    worst = max(planned_stages, key=lambda stage: stage.peak_bytes - planned[stage.name, stage.component])
    expected = planned[worst.name, worst.component]
    beyond = worst.peak_bytes - expected
    if beyond <= max(expected // 100, 8 * MIB):
        return None
    return (
        f"{worst.name} allocated {format_size(worst.peak_bytes)}, {format_size(beyond)} more than the "
        f"{format_size(expected)} that were planned"
    )


def budget_passed(reserved_bytes: int, plan: Any) -> str | None:
    """A sentence on the budget of ``plan`` if reserved bytes and the driver's share exceed it; None if they do not.

    Args:
        reserved_bytes: the most that torch's allocator reserved; 0: it is unknown.
        plan: the plan that was attached.
    """
    whole = reserved_bytes + plan.predicted.overhead_bytes
    beyond = whole - plan.request.vram
    if not reserved_bytes or beyond <= 0:
        return None
    return (
        f"the budget was passed: {format_size(whole)} were reserved, with the driver's share, "
        f"{format_size(beyond)} more than {format_size(plan.request.vram)}"
    )


@contextlib.contextmanager
def measured(target: Any, anatomy: Anatomy | None = None, device: torch.device | None = None) -> Iterator[MeasuredRun]:
    """Record stages, seconds and peak bytes of what ``target`` runs inside the block.

    Use it as ``with measured(pipe) as run: pipe("...")``, then read ``run.stages``. On a GPU the figures are those of
    ``torch.cuda``, whose peak statistics are reset. On a CPU they are the events of torch's allocator, which counts
    weights and maps in host memory too; there each operator takes a few microseconds longer, and only the calling
    thread is recorded.

    Args:
        target: what ``optimize`` takes, with a plan attached or without.
        anatomy: parts of the target; None: found by looking at it.
        device: where it runs; None: found likewise.

    Yields:
        The stages with their seconds and peak bytes, weights included; empty until the block ends.

    Raises:
        BadInputError: a target of no known family, or a device whose memory is not recorded.
    """
    attached = attachments(target)
    anatomy = anatomy or anatomy_of(target, attached[-1].settings if attached else None)
    run = MeasuredRun()
    device = device or _device_of(target, anatomy)
    check_measuring(device)
    watch = _OnGpu(device) if device.type == "cuda" else _OnCpu(anatomy)
    with contextlib.ExitStack() as stack:
        for name, component in anatomy.components.items():
            for entry in anatomy.entries[name]:
                around = functools.partial(_enter, watch.begin, _stage_name(anatomy, name, entry), name)
                stack.callback(set_patch(wrap(component, entry, around, "measured")))
        with watch.watching():
            yield run
        run.stages = tuple(_join_calls(watch.stages()))


def _device_of(target: Any, anatomy: Anatomy) -> torch.device:
    for attachment in attachments(target):
        return attachment.device
    return next((tensor.device for tensor in all_tensors(*anatomy.components.values())), torch.device("cpu"))


def _stage_name(anatomy: Anatomy, component: str, entry: str) -> str:
    if component == anatomy.denoiser:
        return "denoise"
    if component == anatomy.autoencoder:
        return entry
    if component == CONTROL:
        return CONTROL_STAGE
    return TEXT_STAGE if component.startswith("text_encoder") else component


def _enter(
    begin: Callable[[str, str], None], name: str, component: str, original: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    begin(name, component)
    return original(*args, **kw)


def _join_calls(stages: Iterator[MeasuredStage]) -> Iterator[MeasuredStage]:
    """Neighbours that are calls of one stage (the texts of guidance) as one, steps apart."""
    last: MeasuredStage | None = None
    for stage in stages:
        if last is None:
            last = stage
        elif (stage.name, stage.component) != (last.name, last.component) or stage.name == "denoise":
            yield last
            last = stage
        else:
            later = tuple((last.seconds + second, nbytes) for second, nbytes in stage.curve)
            peak = max(last.peak_bytes, stage.peak_bytes)
            reserved = max(last.reserved_bytes, stage.reserved_bytes)
            seconds = last.seconds + stage.seconds
            last = MeasuredStage(last.name, last.component, seconds, peak, last.curve + later, reserved)
    if last is not None:
        yield last


class _OnGpu:
    """Peaks of ``torch.cuda``, reset at each stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[tuple[str, str, float]] = []
        self._peaks: list[tuple[int, int]] = []
        self._end = 0.0

    def begin(self, name: str, component: str) -> None:
        self._close()
        self._begun.append((name, component, time.perf_counter()))

    def _close(self) -> None:
        torch.cuda.synchronize(self._device)
        if self._begun:
            peaks = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
            self._peaks.append(peaks)
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats(self._device)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._close()
            self._end = time.perf_counter()
            if self._begun:
                self._begun[0] = (*self._begun[0][:2], start)

    def stages(self) -> Iterator[MeasuredStage]:
        ends = [start for _, _, start in self._begun[1:]] + [self._end]
        for (name, component, start), end, (peak, reserved) in zip(self._begun, ends, self._peaks, strict=True):
            yield MeasuredStage(name, component, end - start, peak, reserved_bytes=reserved)


class _OnCpu:
    """Events of the CPU's allocator. The end of an older storage is not an event, so older storages are watched."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._components = list(anatomy.components.values())
        self._begun: list[tuple[str, str, int]] = []
        self._before: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []
        self._held = 0
        self._span = (0, 0)

    def begin(self, name: str, component: str) -> None:
        self._begun.append((name, component, time.time_ns()))

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        tensors = (tensor for tensor in all_tensors(*self._components) if tensor.device.type == "cpu")
        return {storage_key(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        storages = self._storages()
        self._before = {key: storage.nbytes() for key, storage in storages.items()}
        self._held = sum(self._before.values())
        deaths = Deaths(lambda key: self._changes.append((time.time_ns(), -self._before.pop(key))))
        for key in self._before:
            deaths.watch(storages[key])
        del storages
        start = time.time_ns()
        profile = allocator_profile()
        try:
            with profile:
                yield
                end = time.time_ns()
        except BaseException:
            deaths.forget()
            raise
        deaths.look()
        deaths.forget()
        self._span = start, end
        self._changes += allocator_events(profile)

    def stages(self) -> Iterator[MeasuredStage]:
        begun = [(name, component, start) for name, component, start in self._begun]
        if not begun:
            return
        begun[0] = (*begun[0][:2], self._span[0])
        ends = [start for _, _, start in begun[1:]] + [self._span[1]]
        changes = sorted(self._changes, key=lambda change: change[0])
        live, place = self._held, 0
        for (name, component, start), end in zip(begun, ends, strict=True):
            samples = [(0.0, live)]
            while place < len(changes) and (changes[place][0] < end or end == ends[-1]):
                live += changes[place][1]
                samples.append((max(0.0, (changes[place][0] - start) / 1e9), live))
                place += 1
            yield MeasuredStage(name, component, (end - start) / 1e9, max(b for _, b in samples), _thin(samples))


def _thin(samples: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Samples for a plot, each the highest of a group."""
    size = -(-len(samples) // _POINTS)
    return tuple(max(samples[at : at + size], key=lambda point: point[1]) for at in range(0, len(samples), size))
