"""Ways to compute the same, in turn within one process: medians, their spread, and whether the processor was ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Any]


class CallTime(NamedTuple):
    """Times of one call.

    Attributes:
        seconds: wall time until the device has finished.
        own: share of that time in which this thread had a processor; far below 1, other programs had it. It is 1 if the
            device is not a CPU, because the thread then waits for it.
    """

    seconds: float
    own: float


class PairedTimes(NamedTuple):
    """Times of several ways that ran alternately.

    Attributes:
        seconds: for each way the seconds of its calls, in order.
        own: as in :class:`CallTime`, for all calls together.
    """

    seconds: list[list[float]]
    own: float


def now(device: torch.device) -> float:
    """Seconds, when all that was asked of ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Call, device: torch.device) -> tuple[CallTime, Any]:
    """Duration of ``call``, and its result."""
    start, processor = now(device), time.thread_time()
    result = call()
    seconds, processor = now(device) - start, time.thread_time() - processor
    return CallTime(seconds, min(1.0, processor / max(seconds, 1e-9)) if device.type == "cpu" else 1.0), result


def time_alternately(ways: Sequence[Call], rounds: int, device: torch.device, warm_ups: int = 1) -> PairedTimes:
    """Time ``ways``, each once a round; every other round begins with the last. ``warm_ups`` rounds do not count."""
    seconds: list[list[float]] = [[] for _ in ways]
    own = whole = 0.0
    for number in range(-warm_ups, rounds):
        for way in sorted(range(len(ways)), reverse=number % 2 == 1):
            timing, _ = time_call(ways[way], device)
            if number >= 0:
                seconds[way].append(timing.seconds)
                whole += timing.seconds
                own += timing.seconds * timing.own
    return PairedTimes(seconds, own / whole if whole else 1.0)


def spread(values: Sequence[float]) -> float | None:
    """Half of the interquartile range of ``values``, over their median; None if there are too few values."""
    if len(values) < 3:
        return None
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2 / median


def figures(plain: Sequence[float], ours: Sequence[float], own: float) -> dict[str, Any]:
    """Both sides' medians, ``plain_seconds`` and ``seconds``, and their ``ratio`` (above 1: ours is faster), each with
    its :func:`spread` (that of the ratio: of the pairs' ratios), and ``own``."""
    pairs = [other_way / other for other_way, other in zip(plain, ours, strict=True)]
    theirs, seconds = statistics.median(plain), statistics.median(ours)
    spreads = {"plain_spread": spread(plain), "spread": spread(ours), "ratio_spread": spread(pairs)}
    return {"plain_seconds": theirs, "seconds": seconds, "ratio": theirs / seconds, **spreads, "own": own}


def ratio(plain: Call, other: Call, device: torch.device, pairs: int = 9) -> float:
    """Seconds of ``plain`` over those of ``other``, on ``device``; two pairs go before those that count."""
    (theirs, ours), own = time_alternately((plain, other), pairs, device, warm_ups=2)
    return float(figures(theirs, ours, own)["ratio"])


def compare(
    plain: Callable[[], Tensor], ours: Callable[[], Tensor], pairs: int, device: torch.device
) -> dict[str, Any]:
    """:func:`figures` of both, the ``error`` relative to the plain result, and ``warm_up_seconds``: how much longer the
    first call of ours took.

    Args:
        pairs: of calls that count; one of each goes before.
    """
    expected = plain()
    first, result = time_call(ours, device)
    off = (result.double() - expected.double()).norm() / expected.double().norm()
    (theirs, own), had = time_alternately((plain, ours), pairs, device, warm_ups=0)
    summary = figures(theirs, own, had)
    return {**summary, "error": float(off), "warm_up_seconds": max(0.0, first.seconds - summary["seconds"])}
