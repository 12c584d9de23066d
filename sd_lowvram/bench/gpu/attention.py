"""Every attention backend at SD1.5's largest level: error, determinism over many runs, time, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ... import progress
from ...kernels.attention.registry import BACKENDS, available_backends
from ..attention import measured, rows_table
from ..models import dtype_on
from ..trial import measure

LATENTS = (64, 128, 256)
_RUNS = 20


def run(device: torch.device, seconds: Callable[[], float]) -> Any:
    """One row for each backend and size; a backend that is not here has one with ``failed``."""
    rows: list[dict[str, Any]] = []
    for backend, missing in progress.counted("attention", available_backends(device).items()):
        if missing is not None:
            rows.append({"backend": backend, "failed": missing})
        else:
            found = measure(trial_attention, seconds=seconds(), device=str(device), backend=backend, latents=LATENTS)
            rows += found.get("rows") or [{"backend": backend, "failed": found["error"]}]
    return {"rows": rows}


def trial_attention(device: str, backend: str, latents: Sequence[int]) -> dict[str, Any]:
    """The backend beside torch's choice at each size: self-attention of a guided batch, 8 heads of width 40."""
    with torch.inference_mode():
        return {"rows": [_row(torch.device(device), backend, side) for side in latents]}


def _row(device: torch.device, backend: str, side: int) -> dict[str, Any]:
    shape = 2, 8, side * side, side * side, 40
    try:
        row = measured(backend, shape, dtype_on(device), device, BACKENDS["sdpa"], _RUNS)
        return row or {"backend": backend, "failed": f"{side}x{side} does not suit it"}
    except Exception as error:  # one size too many for a backend is a row of the table
        return {"backend": backend, "failed": f"at {side}x{side}: {' '.join(str(error).split())[:200]}"}


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Attention"
    yield ""
    yield "Self-attention of SD1.5's first level, a guided batch, 8 heads of width 40. *Error*: relative, to"
    yield f"float64, on some of the rows. *Same bits*: in all of {_RUNS} runs. *Traced*, *measured*: peaks above"
    yield "the arguments."
    yield ""
    ran = [row for row in part["rows"] if "failed" not in row]
    yield from rows_table(sorted(ran, key=lambda row: row["shape"]), "sdpa")
    for row in part["rows"]:
        if "failed" in row:
            yield ""
            yield f"Not measured: {row['backend']}: {row['failed']}"
