"""What measurements have in common: tables in Markdown, for files and terminals alike, and a clock of a device."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    yield from (f"| {' | '.join(row)} |" for row in rows)


def show(report: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print ``report`` as one JSON value, or ``lines``."""
    print(json.dumps(report, indent=2) if as_json else "\n".join(lines))


def now(device: torch.device) -> float:
    """Seconds, when all that was asked of ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def eight_bits(pixels: Tensor) -> Tensor:
    """Pixels in [0, 1] as a file would hold them: whole numbers up to 255."""
    return pixels.clamp(0, 1).mul(255).round()
