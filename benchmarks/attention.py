"""``attention``: error, same bits, memory and time of every backend, beside plain attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram.devices.info import default_device, dtype_on
from sd_lowvram.devices.pairs import figures, in_turn
from sd_lowvram.errors import SettingsError
from sd_lowvram.files.tables import table
from sd_lowvram.kernels.attention.backend import SCORE_BYTES
from sd_lowvram.kernels.attention.problem import problem_of
from sd_lowvram.kernels.attention.registry import attend as attend_by
from sd_lowvram.kernels.attention.registry import available_backends, kernel_name
from sd_lowvram.kernels.attention.torch_kernels import own_kernel
from sd_lowvram.memory import kernels_of, measured_peak
from sd_lowvram.tracing import trace
from sd_lowvram.units import MIB, format_size

from .calls import timed_runs
from .tables import left_out, milliseconds, pair_cells, written

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
OWN_CHOICE = "torch's own choice"
"""Among backends: torch's function with nothing of ours around it."""
_SCORE_BYTES = (2 * MIB, SCORE_BYTES)
"""Sizes of score blocks for backends that work in blocks."""
_SAMPLED = 256
"""Rows of queries on which the error is taken: in float64 the whole score matrix of 256x256 latents is 512 GiB."""


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(QK^T / sqrt(width)) V with the whole matrix of scores and of probabilities."""
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


def run(
    *,
    shapes: Sequence[Shape] | None = None,
    repeats: int = 5,
    device: torch.device | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure every backend that runs on ``device`` beside plain attention; rows of what :func:`measured` gives."""
    device = device or default_device()
    chosen = shapes or (_ON_CPU if device.type == "cpu" else _ON_GPU)
    reasons = available_backends(device)
    able = [backend for backend, why in reasons.items() if why is None]
    with torch.inference_mode():
        rows = [
            row
            for shape in chosen
            for dtype in dict.fromkeys((dtype_on(device), torch.float32))
            for backend in able
            for score_bytes in (_SCORE_BYTES if backend in ("sliced", "fused-softmax") else _SCORE_BYTES[-1:])
            if (row := measured(backend, shape, dtype, device, plain, repeats, score_bytes)) is not None
        ]
    return written({"rows": rows, "left_out": {name: why for name, why in reasons.items() if why}}, lines, out)


def measured(
    backend: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    beside: Callable[..., Tensor],
    repeats: int,
    score_bytes: int = SCORE_BYTES,
) -> dict[str, Any] | None:
    """Measure a backend for one shape; None if it does not support the shape.

    Returns:
        ``shape``, ``dtype``, ``backend``, ``kernel`` (what ran), ``score_bytes``, ``error`` (relative, to attention in
        float64), ``deterministic`` (the same bits in all runs), ``traced_bytes`` and ``measured_bytes`` (peak above the
        arguments, output included), ``beside_bytes`` (measured); :func:`figures` of ``beside`` and of this, run in
        turn; ``host_seconds`` until the call returned, and ``device_seconds`` between the
        events around it, None on a CPU.
    """
    batch, heads, queries, keys, width = shape
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, tokens, heads, width, generator=noise).to(device, dtype).transpose(1, 2)
        for tokens in (queries, keys, keys)
    )
    torchs = backend == OWN_CHOICE
    function = _as_torch_does if torchs else functools.partial(attend_by, backend, score_bytes=score_bytes)
    attend, attend_beside = functools.partial(function, q, k, v), functools.partial(beside, q, k, v)
    try:
        first = attend()
    except SettingsError:
        return None
    with kernels_of("cpu" if device.type == "cpu" else "gpu"):
        traced = trace(function, q, k, v).activation_peak_bytes
    (theirs, ours), own = in_turn((attend_beside, attend), repeats, device)
    sampled = torch.linspace(0, queries - 1, min(_SAMPLED, queries), device=device).long()
    exact = _exact(q[:, :, sampled], k, v)
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "kernel": own_kernel(problem_of(q, k, v)) if torchs else kernel_name(backend, problem_of(q, k, v), score_bytes),
        "score_bytes": score_bytes if backend in ("sliced", "fused-softmax") else None,
        "error": float((first[:, :, sampled].double() - exact).norm() / exact.norm()),
        "deterministic": all(torch.equal(attend(), first) for _ in range(repeats)),
        "traced_bytes": traced,
        "measured_bytes": measured_peak(attend),
        "beside_bytes": measured_peak(attend_beside),
        **figures(theirs, ours, own),
        **timed_runs(attend, repeats, device),
    }


def _as_torch_does(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention in float64, head by head."""
    heads = zip(*(one.double().unbind(1) for one in (q, k, v)), strict=True)
    return torch.stack([plain(*head) for head in heads], dim=1)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The table as Markdown."""
    yield "# Attention by every backend, beside plain attention"
    yield ""
    yield "*Shape*: batch x heads x head width, queries x keys. Peaks are above the arguments, with the output."
    yield ""
    yield from rows_table(report["rows"], "plain")
    yield from left_out(report["left_out"])


def rows_table(rows: Iterable[dict[str, Any]], beside: str) -> Iterator[str]:
    """Results of :func:`measured` as a Markdown table; ``beside`` names the other side."""
    heads = ("shape", "type", "backend", "kernel", "error", "same bits", "traced", "measured", beside)
    times = (f"{beside}, ms", "this, ms", "times as fast", "host ms", "device ms")
    return table((*heads, *times), map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    batch, heads, queries, keys, width = row["shape"]
    bound = f" {format_size(row['score_bytes'])}" if row["score_bytes"] else ""
    what = [f"{batch}x{heads}x{width}, {queries} x {keys}", row["dtype"], row["backend"] + bound, row["kernel"]]
    exact = [f"{row['error']:.1e}", "yes" if row["deterministic"] else "no"]
    sizes = [format_size(row[name]) for name in ("traced_bytes", "measured_bytes", "beside_bytes")]
    apart = milliseconds(row["host_seconds"], row["device_seconds"])
    return [*what, *exact, *sizes, *pair_cells(row, "{:.2f}", 1e-3), *apart]
