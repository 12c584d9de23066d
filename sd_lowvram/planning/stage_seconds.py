"""Seconds of a stage, made of its counts: nothing but this file turns operators, layers and bytes into time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ..devices.performance import THIS, Rates
from ..devices.this_machine import rates_of
from ..policies import Pace
from ..streaming.simulator import CopyQueue
from ..streaming.timing import offload_launches
from ..tracing.tracer import Figures
from .stage_costs import Step


@dataclass(frozen=True)
class Work:
    """One call of a stage with all weights on the device.

    Attributes:
        figures: operations, bytes and operators, as traced.
        element_bytes: bytes of an element in its products.
        in_strips: True for an exact decode in strips.
        replayed_modules: modules of a model whose pass is replayed as one recording; 0: operators are launched.
        skipped: paths of modules that do not run in the share ``skips`` of all calls.
        gain: speed-up by compiled code.
    """

    figures: Figures
    element_bytes: int
    in_strips: bool = False
    replayed_modules: int = 0
    skipped: Collection[str] = ()
    skips: float = 0.0
    gain: float = 1.0


@dataclass(frozen=True)
class Counts:
    """Counts of what a stage does in a run.

    Attributes:
        calls: of the stage.
        call: clocks of its :class:`Work`.
        layers: calls of layers in a step, whose weights our engine lends; in a stage that runs once, layers that
            another program fetches.
        step: a call with streamed weights; None: no weights are fetched during a call.
        copies: the cost of copies before a call; None: weights stay where they are.
        brought_bytes, read_bytes, disk_bytes: weights that are copied before a call, the part of them that is read, and
            the part of that on disk.
        times_brought: number of calls before which they are.
        recorded_operators: operators of a pass that is recorded.
        compiling_seconds: until compiled code is ready, as far as they count for this run.
    """

    calls: int
    call: Clocks
    layers: int = 0
    step: Step | None = None
    copies: CopyQueue | None = None
    brought_bytes: int = 0
    read_bytes: int = 0
    disk_bytes: int = 0
    times_brought: int = 1
    recorded_operators: int = 0
    compiling_seconds: float = 0.0


@dataclass(frozen=True)
class Clocks:
    """The two clocks of one call: the program launches operators, and the device executes them.

    Attributes:
        host: seconds of the program.
        device: seconds of the device, if launches took none.
        replayed: True if one launch replays the call, during which the program only looks through the model.
        share: share of both that remains, on average over all calls, with skipped layers and compiled code.
    """

    host: float
    device: float
    replayed: bool = False
    share: float = 1.0

    def seconds(self, rates: Rates) -> float:
        """Return the seconds of the call."""
        both = max(self.device, self.host) if self.replayed else rates.combine(self.device, self.host)
        return both * self.share


def clocks(work: Work, rates: Rates) -> Clocks:
    """Clocks of one call whose weights are on the device."""
    figures, size = work.figures, work.element_bytes
    replayed = work.replayed_modules > 0
    launched = figures.operators * (rates.strip_launches if work.in_strips else 1.0)
    device, host = rates.clocks(figures, size, rates.replay_launches * work.replayed_modules if replayed else launched)
    share = 1.0
    if work.skipped and figures.spans:
        spans = list(zip(figures.spans, rates.shares(figures.spans, size), strict=True))
        deep = tuple(f"{path}." for path in work.skipped)
        passed = sum(taken for span, taken in spans if f"{span.path}.".startswith(deep))
        share -= work.skips * passed / sum(taken for _, taken in spans)
    return Clocks(host, device, replayed, share / work.gain)


def processor_seconds(figures: Figures, rates: Rates) -> float:
    """Seconds of a stage on the CPU of a machine with a GPU of ``rates``; calibrated if it is this machine."""
    if rates.name == THIS:
        return rates_of(torch.device("cpu")).seconds(figures, torch.float32.itemsize)
    return figures.flops / rates.processor_flops


@dataclass(frozen=True)
class StageSeconds:
    """Time of all calls of a stage.

    Attributes:
        seconds: of the stage, with all that comes before its calls.
        host: seconds in which the program launches operators, layers and fetches in its calls.
        device: seconds in which the device computes in its calls, or copies weights in them if that is longer.
        slowdown: time of a call relative to one with all weights on the device.
    """

    seconds: float
    host: float
    device: float
    slowdown: float = 1.0


def stage_seconds(counts: Counts, rates: Rates, pace: Pace) -> StageSeconds:
    """Seconds of all calls of a stage.

    Args:
        counts: what the stage does.
        rates: of the device.
        pace: of the program that runs it.
    """
    call, step, copies = counts.call, counts.step, counts.copies
    layer, fetch = offload_launches(rates, pace.layer)
    lent = dataclasses.replace(call, host=call.host + counts.layers * layer * rates.launch_seconds)
    each, host, device, slowdown = lent.seconds(rates), lent.host * call.share, call.device * call.share, 1.0
    copied = copies.seconds(counts.brought_bytes, counts.read_bytes, counts.disk_bytes) if copies else 0.0
    if step and copies:
        # the first step fetches its residents while it computes; what must be read comes before
        copied += step.first_wait - copies.seconds(counts.brought_bytes)
        (fetched,) = copies.fetch_seconds([step.streamed_bytes])
        device = max(call.device, fetched) if copies.overlap else call.device + fetched
        host = lent.host + step.fetches * fetch * rates.launch_seconds
        each, plain = max(step.seconds, host), call.seconds(rates)
        slowdown = each / plain if plain else 1.0
    prepared = counts.compiling_seconds + 2 * counts.recorded_operators * rates.launch_seconds
    return StageSeconds(
        seconds=counts.calls * each + counts.times_brought * copied + prepared,
        host=counts.calls * host,
        device=counts.calls * device,
        slowdown=slowdown,
    )
