"""Two ways to compute the same, in turn within one process, and the ratio of their medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]


def now(device: torch.device) -> float:
    """Seconds, when all that was asked of ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ratio(plain: Call, other: Call, device: torch.device, pairs: int = 9) -> float:
    """Seconds of ``plain`` over those of ``other``, on ``device``; two pairs go before those that count."""
    turns = [[_timed(way, device)[0] for way in (plain, other)] for _ in range(pairs + 2)][2:]
    theirs, ours = zip(*turns, strict=True)
    return float(statistics.median(theirs) / statistics.median(ours))


def compared(plain: Call, ours: Call, pairs: int, device: torch.device) -> dict[str, Any]:
    """``plain_seconds``, ``seconds``, their ``ratio`` (above 1: ours is faster), the ``error`` relative to the plain
    result, and ``warm_up_seconds``: how much longer the first call of ours took.

    Args:
        pairs: of calls that count; one of each goes before.
    """
    expected = plain()
    first, found = _timed(ours, device)
    off = (found.double() - expected.double()).norm() / expected.double().norm()
    turns = [(_timed(plain, device)[0], _timed(ours, device)[0]) for _ in range(pairs)]
    theirs, own = (statistics.median(column) for column in zip(*turns, strict=True))
    return {
        "plain_seconds": theirs,
        "seconds": own,
        "ratio": theirs / own,
        "error": float(off),
        "warm_up_seconds": max(0.0, first - own),
    }


def _timed(call: Call, device: torch.device) -> tuple[float, Tensor]:
    start = now(device)
    result = call()
    return now(device) - start, result
