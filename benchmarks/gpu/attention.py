"""Every attention backend at SD1.5's largest level: error, determinism over many runs, time, memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.devices.info import dtype_on
from sd_lowvram.errors import SettingsError
from sd_lowvram.kernels.attention.registry import attend, available_backends

from ..attention import OWN_CHOICE, measured, rows_table
from .record import Case, ResultRows, not_run

LATENTS = (64, 128, 256)
_RUNS = 20


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each backend and size; rows of a missing backend have ``failed``."""
    backends = {OWN_CHOICE: None} | available_backends(device)
    for backend, missing in progress.counted("attention", backends.items()):
        cases = [{"backend": backend, "latents": side} for side in LATENTS]
        if missing is None:
            record.fill(cases, trial_attention, device=str(device))
        else:
            record.add(cases[0], {"failed": missing})


def trial_attention(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Each backend beside torch's choice at its size: self-attention of a guided batch, 8 heads of width 40."""
    with torch.inference_mode():
        for case in cases:
            yield _row(torch.device(device), case["backend"], case["latents"])


def _row(device: torch.device, backend: str, side: int) -> dict[str, Any]:
    shape = 2, 8, side * side, side * side, 40
    try:
        row = measured(backend, shape, dtype_on(device), device, functools.partial(attend, "sdpa"), _RUNS)
        return row or {"failed": f"{side}x{side} does not suit it"}
    except (SettingsError, torch.cuda.OutOfMemoryError) as error:  # what leaves the device as it was
        return {"failed": f"at {side}x{side}: {' '.join(str(error).split())[:200]}"}


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
    yield f"float64, on some of the rows. *Same bits*: in all of {_RUNS} runs. *Traced*, *measured*: peaks above"
    yield "the arguments. *Host*: until the call returned; *device*: between the events around it; medians."
    yield f"*{OWN_CHOICE}*: its function as it is, by the kernel that it says it takes."
    yield ""
    ran = [row for row in part["rows"] if "shape" in row]
    yield from rows_table(sorted(ran, key=lambda row: row["shape"]), "sdpa")
    for row in part["rows"]:
        if "shape" not in row:
            yield ""
            why = " ".join((row.get("failed") or row["error"]).split())
            yield f"{'Not run here' if 'failed' in row else 'Not measured'}: {row['backend']}: {why}"
