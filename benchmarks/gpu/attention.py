"""Every attention backend at SD1.5's largest level: error, determinism over many runs, time, memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.devices.info import dtype_on
from sd_lowvram.devices.pairs import figures, time_alternately
from sd_lowvram.errors import SettingsError
from sd_lowvram.files import table
from sd_lowvram.kernels.attention.backend import SCORE_BYTES
from sd_lowvram.kernels.attention.problem import problem_of
from sd_lowvram.kernels.attention.registry import attend, available_backends, kernel_name
from sd_lowvram.kernels.attention.torch_kernels import own_kernel
from sd_lowvram.memory import kernels_of, measured_peak
from sd_lowvram.tracing import trace
from sd_lowvram.units import format_size

from ..calls import timed_runs
from ..tables import milliseconds, pair_cells
from .record import Case, ResultRows, not_run

LATENTS = (64, 128, 256)
OWN_CHOICE = "torch's own choice"
"""Among backends: torch's function with nothing of ours around it."""
_RUNS = 20
_SAMPLED = 256
"""Rows of queries on which the error is taken: in float64 the whole score matrix of 256x256 latents is 512 GiB."""


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each backend and size; rows of a missing backend have ``failed``."""
    backends = {OWN_CHOICE: None} | available_backends(device)
    for backend, missing in progress.report_each("attention", backends.items()):
        cases = [{"backend": backend, "latents": side} for side in LATENTS]
        if missing is None:
            record.fill(cases, trial_attention, device=str(device))
        else:
            record.add(cases[0], {"failed": missing})


def trial_attention(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Each backend compared with torch's choice at its size: self-attention of a guided batch, 8 heads of width 40."""
    with torch.inference_mode():
        for case in cases:
            yield _row(torch.device(device), case["backend"], case["latents"])


def _row(device: torch.device, backend: str, side: int) -> dict[str, Any]:
    try:
        return _measured(backend, (2, 8, side * side, 40), device)
    except (SettingsError, torch.cuda.OutOfMemoryError) as error:  # what leaves the device as it was
        return {"failed": f"at {side}x{side}: {' '.join(str(error).split())[:200]}"}


def _measured(backend: str, shape: tuple[int, int, int, int], device: torch.device) -> dict[str, Any]:
    """Measure self-attention of ``shape`` (batch, heads, tokens, width), in turn with the backend "sdpa".

    Returns:
        ``shape``, ``dtype``, ``backend``, ``kernel`` (what ran), ``score_bytes``, ``error`` (relative, to attention in
        float64), ``deterministic`` (the same bits in all runs), ``traced_bytes`` and ``measured_bytes`` (peak above the
        arguments, output included), ``beside_bytes`` (measured), :func:`figures` of "sdpa" and of this,
        ``host_seconds`` until the call returned, ``device_seconds`` between events around it, None on a CPU.
    """
    batch, heads, tokens, width = shape
    noise, dtype = torch.Generator().manual_seed(0), dtype_on(device)
    q, k, v = (
        torch.randn(batch, tokens, heads, width, generator=noise).to(device, dtype).transpose(1, 2) for _ in range(3)
    )
    torchs = backend == OWN_CHOICE
    function = _as_torch_does if torchs else functools.partial(attend, backend, score_bytes=SCORE_BYTES)
    ours, beside = functools.partial(function, q, k, v), functools.partial(attend, "sdpa", q, k, v)
    first = ours()
    with kernels_of("cpu" if device.type == "cpu" else "gpu"):
        traced = trace(function, q, k, v).activation_peak_bytes
    (theirs, seconds), own = time_alternately((beside, ours), _RUNS, device)
    sampled = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens), device=device).long()
    exact = _exact(q[:, :, sampled], k, v)
    return {
        "shape": [batch, heads, tokens, tokens, width],
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "kernel": own_kernel(problem_of(q, k, v)) if torchs else kernel_name(backend, problem_of(q, k, v), SCORE_BYTES),
        "score_bytes": SCORE_BYTES if backend in ("sliced", "fused-softmax") else None,
        "error": float((first[:, :, sampled].double() - exact).norm() / exact.norm()),
        "deterministic": all(torch.equal(ours(), first) for _ in range(_RUNS)),
        "traced_bytes": traced,
        "measured_bytes": measured_peak(ours),
        "beside_bytes": measured_peak(beside),
        **figures(theirs, seconds, own),
        **timed_runs(ours, _RUNS, device),
    }


def _as_torch_does(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in float64, head by head."""
    heads = zip(*(one.double().unbind(1) for one in (q, k, v)), strict=True)
    return torch.stack([torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v for q, k, v in heads], dim=1)


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if "shape" in row]
    for side in dict.fromkeys(row["latents"] for row in ran):
        first = min((row for row in ran if row["latents"] == side), key=lambda row: row["seconds"])
        yield f"{side}x{side}: {first['backend']} is fastest, {first['ratio']:.2f} times as fast as sdpa"
    if unsteady := dict.fromkeys(row["backend"] for row in ran if not row["deterministic"]):
        yield f"not the same bits in every run: {', '.join(unsteady)}"
    yield from not_run(rows, lambda row: row["backend"])


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Attention"
    yield ""
    yield "Self-attention of SD1.5's first level, a guided batch, 8 heads of width 40. *Error*: relative, to"
    yield f"float64, on some of the rows. *Same bits*: in all of {_RUNS} runs. *Traced*, *measured*: the most bytes"
    yield "beyond the arguments. *Host*: until the call returned; *device*: between the events around it; medians."
    yield f"*{OWN_CHOICE}*: its function as it is, by the kernel that it says it takes."
    yield ""
    heads = ("shape", "type", "backend", "kernel", "error", "same bits", "traced", "measured", "sdpa")
    times = ("sdpa, ms", "this, ms", "times as fast", "host ms", "device ms")
    ran = [row for row in part["rows"] if "shape" in row]
    yield from table((*heads, *times), map(_cells, sorted(ran, key=lambda row: row["shape"])))
    for row in part["rows"]:
        if "shape" not in row:
            yield ""
            why = " ".join((row.get("failed") or row["error"]).split())
            yield f"{'Not run here' if 'failed' in row else 'Not measured'}: {row['backend']}: {why}"


def _cells(row: dict[str, Any]) -> list[str]:
    batch, heads, queries, keys, width = row["shape"]
    bound = f" {format_size(row['score_bytes'])}" if row["score_bytes"] else ""
    what = [f"{batch}x{heads}x{width}, {queries} x {keys}", row["dtype"], row["backend"] + bound, row["kernel"]]
    exact = [f"{row['error']:.1e}", "yes" if row["deterministic"] else "no"]
    sizes = [format_size(row[name]) for name in ("traced_bytes", "measured_bytes", "beside_bytes")]
    apart = milliseconds(row["host_seconds"], row["device_seconds"])
    return [*what, *exact, *sizes, *pair_cells(row, "{:.2f}", 1e-3), *apart]
