"""How many times as fast one way is as another: both in turn within one process, and the ratio of their medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

_PAIRS = 9


def ratio(plain: Callable[[], Tensor], other: Callable[[], Tensor], device: torch.device, pairs: int = _PAIRS) -> float:
    """Seconds of ``plain`` over those of ``other``, on ``device``; two pairs go before those that count."""
    turns = [[_seconds(way, device) for way in (plain, other)] for _ in range(pairs + 2)][2:]
    theirs, ours = zip(*turns, strict=True)
    return float(statistics.median(theirs) / statistics.median(ours))


def _seconds(way: Callable[[], Tensor], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    way()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
