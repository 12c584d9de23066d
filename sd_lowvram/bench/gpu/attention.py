"""Every attention backend at SD1.5's largest level: error, determinism over many runs, time, memory."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import progress
from ...units import MIB
from ..attention import plain
from ..models import TINY, dtype_on
from ..report import now, table
from ..trial import measure

LATENTS = (64, 128, 256)
_SAMPLED = 256
"""Rows of queries on which the error is taken: in float64 a whole score matrix of 256x256 latents is 512 GiB."""
_RUNS = 20


def run(device: torch.device, model: str | None, seconds: Callable[[], float]) -> Any:
    """One row for each backend and size; a backend that is not here has one with ``error``."""
    from ...kernels.attention.registry import available_backends

    latents = [8] if model == TINY else list(LATENTS)
    rows: list[dict[str, Any]] = []
    backends = available_backends(device)
    for number, (backend, missing) in enumerate(backends.items()):
        if missing is not None:
            rows.append({"backend": backend, "error": missing})
        else:
            found = measure("attention", seconds=seconds(), device=str(device), backend=backend, latents=latents)
            rows += found.get("rows") or [{"backend": backend, **found}]
        progress.report("attention", number + 1, len(backends))
    return {"rows": rows}


def trial_attention(device: str, backend: str, latents: list[int]) -> dict[str, Any]:
    """The backend at each size: self-attention of a guided batch, 8 heads of width 40."""
    where = torch.device(device)
    with torch.inference_mode():
        return {"rows": [_row(where, backend, side) for side in latents]}


def _row(device: torch.device, backend: str, side: int) -> dict[str, Any]:
    from ...kernels.attention.problem import problem_of
    from ...kernels.attention.registry import BACKENDS, kernel_name
    from ...memory import measured_peak

    noise = torch.Generator().manual_seed(side)
    dtype = dtype_on(device)
    q, k, v = (torch.randn(2, side * side, 8, 40, generator=noise).to(device, dtype).transpose(1, 2) for _ in "qkv")
    attend = functools.partial(BACKENDS[backend], q, k, v)
    row: dict[str, Any] = {"backend": backend, "latents": side}
    try:
        first = attend()
        peak = measured_peak(attend)
        seconds, same = [], True
        for _ in range(_RUNS):
            start = now(device)
            again = attend()
            seconds.append(now(device) - start)
            same = same and torch.equal(first, again)
    except Exception as error:  # one size too many for a backend is a row of the table
        return row | {"error": " ".join(str(error).split())[:200]}
    sampled = torch.linspace(0, side * side - 1, min(_SAMPLED, side * side), device=device).long()
    exact = _exact(q[:, :, sampled], k, v)
    return row | {
        "kernel": kernel_name(backend, problem_of(q, k, v)),
        "error_relative": float((first[:, :, sampled].double() - exact).norm() / exact.norm()),
        "deterministic": same,
        "seconds": statistics.median(seconds),
        "peak_bytes": peak,
    }


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention in float64, head by head."""
    heads = zip(*(one.double().unbind(1) for one in (q, k, v)), strict=True)
    return torch.stack([plain(*head) for head in heads], dim=1)


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Attention"
    yield ""
    yield "Self-attention of SD1.5's first level, a guided batch, 8 heads of width 40, fp16. *Error*: relative, to"
    yield f"float64, on {_SAMPLED} rows. *Same bits*: in all of {_RUNS} runs. *Peak*: above the arguments."
    yield ""
    measured = [row for row in part["rows"] if "seconds" in row]
    sdpa = {row["latents"]: row["seconds"] for row in measured if row["backend"] == "sdpa"}
    by_size = sorted(measured, key=lambda row: row["latents"])
    yield from table(_HEADS, (_cells(row, sdpa.get(row["latents"])) for row in by_size))
    for row in part["rows"]:
        if "error" in row:
            where = f" at {row['latents']}x{row['latents']}" if "latents" in row else ""
            yield ""
            yield f"Not measured: {row['backend']}{where}: {row['error']}"


_HEADS = ("latents", "backend", "kernel", "error", "same bits", "ms", "time / sdpa", "peak MiB")


def _cells(row: dict[str, Any], sdpa: float | None) -> list[str]:
    ratio = f"{row['seconds'] / sdpa:.2f}" if sdpa else ""
    what = [f"{row['latents']}x{row['latents']}", row["backend"], row["kernel"], f"{row['error_relative']:.1e}"]
    same = "yes" if row["deterministic"] else "no"
    return [*what, same, f"{1000 * row['seconds']:.2f}", ratio, f"{row['peak_bytes'] / MIB:.0f}"]
