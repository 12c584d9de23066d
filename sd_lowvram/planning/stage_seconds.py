"""Seconds of a stage, made of its counts: nothing but this file turns operators, layers and bytes into time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ..devices.performance import THIS, Rates
from ..devices.this_machine import rates_of
from ..policies import Pace
from ..streaming.simulator import CopyQueue
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
        call_seconds: of its :class:`Work`.
        fetched_layers: layers that another program fetches in a call, one at a time.
        step: a call with streamed weights; None: no weights are fetched during a call.
        copies: the cost of copies before a call; None: weights stay where they are.
        brought_bytes, read_bytes, disk_bytes: weights that are copied before a call, the part of them that is read, and
            the part of that on disk.
        times_brought: number of calls before which they are.
        recorded_operators: operators of a pass that is recorded.
        compiling_seconds: until compiled code is ready, as far as they count for this run.
    """

    calls: int
    call_seconds: float
    fetched_layers: int = 0
    step: Step | None = None
    copies: CopyQueue | None = None
    brought_bytes: int = 0
    read_bytes: int = 0
    disk_bytes: int = 0
    times_brought: int = 1
    recorded_operators: int = 0
    compiling_seconds: float = 0.0


def call_seconds(work: Work, rates: Rates) -> float:
    """Seconds of one call whose weights are on the device, on average over all calls."""
    figures, size = work.figures, work.element_bytes
    launched = figures.operators * (rates.strip_launches if work.in_strips else 1.0)
    seconds = rates.seconds(figures, size, 1 if work.replayed_modules else launched)
    seconds = max(seconds, rates.replay_launches * work.replayed_modules * rates.launch_seconds)
    if work.skipped and figures.spans:
        spans = list(zip(figures.spans, rates.shares(figures.spans, size), strict=True))
        deep = tuple(f"{path}." for path in work.skipped)
        passed = sum(taken for span, taken in spans if f"{span.path}.".startswith(deep))
        seconds *= 1 - work.skips * passed / sum(taken for _, taken in spans)
    return seconds / work.gain


def processor_seconds(figures: Figures, rates: Rates) -> float:
    """Seconds of a stage on the CPU of a machine with a GPU of ``rates``; calibrated if it is this machine."""
    if rates.name == THIS:
        return rates_of(torch.device("cpu")).seconds(figures, torch.float32.itemsize)
    return figures.flops / rates.processor_flops


def stage_seconds(counts: Counts, rates: Rates, pace: Pace) -> tuple[float, float]:
    """Seconds of all calls of a stage, and the time of a call over that with all weights on the device.

    Args:
        counts: what the stage does.
        rates: of the device.
        pace: of the program that runs it.
    """
    call = counts.call_seconds + counts.fetched_layers * (pace.layer or 0.0) * rates.launch_seconds
    step = counts.step
    seconds = counts.calls * (step.seconds if step else call)
    if counts.copies is not None:
        copied = counts.copies.seconds(counts.brought_bytes, counts.read_bytes, counts.disk_bytes)
        if step:  # the first step fetches its residents while it computes; what must be read comes before
            copied += step.first_wait - counts.copies.seconds(counts.brought_bytes)
        seconds += counts.times_brought * copied
    seconds += counts.compiling_seconds + 2 * counts.recorded_operators * rates.launch_seconds
    return seconds, step.seconds / call if step and call else 1.0
