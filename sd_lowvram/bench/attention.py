"""``sd-lowvram bench attention``: error, memory and time of every backend, beside plain attention."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..devices.info import default_device
from ..errors import SettingsError
from ..kernels.attention.problem import problem_of
from ..kernels.attention.registry import BACKENDS, available_backends, kernel_name
from ..memory import kernels_of, measured_peak
from ..tracing import trace
from ..units import MIB, format_size
from .report import now, show, table

Shape = tuple[int, int, int, int, int]
"""(batch, heads, queries, keys, width)."""

_ON_GPU: tuple[Shape, ...] = (
    (2, 8, 4096, 4096, 40),
    (2, 8, 4096, 77, 40),
    (2, 8, 1024, 1024, 80),
    (2, 8, 64, 64, 160),
    (1, 8, 16384, 16384, 40),
    (1, 1, 4096, 4096, 512),
)
_ON_CPU: tuple[Shape, ...] = (
    (2, 8, 1024, 1024, 40),
    (2, 8, 1024, 77, 40),
    (2, 8, 64, 64, 160),
    (1, 8, 2025, 2025, 40),
    (1, 1, 2048, 2048, 512),
)
_SCORE_BYTES = (2 * MIB, 32 * MIB)  # for backends in blocks: a small and the default bound


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QK^T / sqrt(width)) V with the whole matrix of scores and of probabilities."""
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


def run(
    json: bool = False, *, shapes: Sequence[Shape] | None = None, repeats: int = 5, device: torch.device | None = None
) -> list[dict[str, Any]]:
    """Measure every backend that runs on ``device`` and print a table, or one JSON list.

    Each row has: ``shape``, ``dtype``, ``backend``, ``kernel`` (what ran), ``score_bytes``, ``error`` (relative, to
    attention in float64), ``traced_bytes`` and ``measured_bytes`` (peak above the arguments, output included),
    ``plain_bytes`` (measured), ``time_ratio`` (median time over plain attention's, run in turn) and ``seconds``.
    """
    device = device or default_device()
    chosen = shapes or (_ON_CPU if device.type == "cpu" else _ON_GPU)
    dtypes = (torch.float32,) if device.type == "cpu" else (torch.float16, torch.float32)
    with torch.inference_mode():
        rows = [row for shape in chosen for dtype in dtypes for row in _rows(shape, dtype, device, repeats)]
    show(rows, _lines(rows, available_backends(device)), json)
    return rows


def _rows(shape: Shape, dtype: torch.dtype, device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    batch, heads, queries, keys, width = shape
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, tokens, heads, width, generator=noise).to(device, dtype).transpose(1, 2)
        for tokens in (queries, keys, keys)
    )
    exact = plain(q.double(), k.double(), v.double())
    plain_bytes = measured_peak(functools.partial(plain, q, k, v))
    for backend, why in available_backends(device).items():
        for score_bytes in _SCORE_BYTES if backend in ("sliced", "fused-softmax") else _SCORE_BYTES[-1:]:
            function = functools.partial(BACKENDS[backend], score_bytes=score_bytes)
            if why is not None or not _runs(functools.partial(function, q, k, v)):
                continue
            with kernels_of("cpu" if device.type == "cpu" else "gpu"):
                traced = trace(function, q, k, v).activation_peak_bytes
            attend, attend_plainly = (functools.partial(one, q, k, v) for one in (function, plain))
            ours, theirs = in_turn(attend, attend_plainly, repeats, device)
            yield {
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "backend": backend,
                "kernel": kernel_name(backend, problem_of(q, k, v), score_bytes),
                "score_bytes": score_bytes if backend in ("sliced", "fused-softmax") else None,
                "error": float((function(q, k, v).double() - exact).norm() / exact.norm()),
                "traced_bytes": traced,
                "measured_bytes": measured_peak(attend),
                "plain_bytes": plain_bytes,
                "time_ratio": ours / theirs,
                "seconds": ours,
            }


def _runs(function: Callable[[], Any]) -> bool:
    try:
        function()
    except SettingsError:
        return False
    return True


def in_turn(
    ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int, device: torch.device
) -> tuple[float, float]:
    """Median seconds of both, run alternately after one warm-up each."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for function, seconds in zip((ours, theirs), times):  # noqa: B905
            start = now(device)
            function()
            if turn:
                seconds.append(now(device) - start)
    return statistics.median(times[0]), statistics.median(times[1])


_HEADS = ("shape", "type", "backend", "kernel", "error", "traced", "measured", "plain", "time / plain")


def _lines(rows: list[dict[str, Any]], reasons: dict[str, str | None]) -> Iterator[str]:
    yield from table(_HEADS, map(_cells, rows))
    yield "shape: batch x heads x head width, queries x keys; peaks above the arguments, with the output"
    yield from (f"not here: {backend}: {why}" for backend, why in reasons.items() if why)


def _cells(row: dict[str, Any]) -> list[str]:
    batch, heads, queries, keys, width = row["shape"]
    bound = f" {format_size(row['score_bytes'])}" if row["score_bytes"] else ""
    sizes = [format_size(row[name]) for name in ("traced_bytes", "measured_bytes", "plain_bytes")]
    what = [f"{batch}x{heads}x{width}, {queries} x {keys}", row["dtype"], row["backend"] + bound, row["kernel"]]
    return [*what, f"{row['error']:.1e}", *sizes, f"{row['time_ratio']:.2f}"]
