"""Calibration as by ``sd-lowvram doctor --calibrate``, for the plans of all later parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sd_lowvram.cache import remember
from sd_lowvram.commands.examination import MEASURED
from sd_lowvram.devices.this_machine import place_of_measurement, stored_measurement
from sd_lowvram.files import table
from sd_lowvram.kernels import compiler
from sd_lowvram.kernels.triton import support
from sd_lowvram.units import MIB

from .record import Case, ResultRows, not_run


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each measurement, in one process like ``doctor``."""
    record.fill([{"what": what} for what in MEASURED], trial_calibration, device=str(device))


def trial_calibration(device: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield for each of ``cases`` the ``measured`` plain values, which are now cached for plans."""
    where = torch.device(device)
    for case in cases:
        why = _NOT_HERE[case["what"]](where) if case["what"] in _NOT_HERE else None
        yield {"measured": MEASURED[case["what"]](where)} | ({"failed": why} if why else {})


def _why_no_overhead(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "it is of a CUDA device"


_NOT_HERE: dict[str, Callable[[torch.device], str | None]] = {
    "overhead": _why_no_overhead,
    "kernels": support.why_not,
    "compile": compiler.why_not,
}
"""Why some of it cannot be measured on a device, of what needs more than the device; None: it can."""
_NAMES = {
    "overhead": "what a context takes",
    "host": "host time of hooks",
    "kernels": "gains of kernels in Triton",
    "compile": "gains of compiling",
}


def recall(rows: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Cache the values of ``rows`` for plans, if this machine has none: it may be new, with results of an equal one."""
    for row in rows:
        if row.get("measured") and stored_measurement(row["what"], device) is None:
            remember(place_of_measurement(row["what"], device), row["measured"])


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    found = {row["what"]: row["measured"] for row in rows if row.get("measured")}
    if rates := found.get("rates"):
        yield f"{rates['half_flops'] / 1e12:.3g} TFLOP/s in 16 bits, {rates['bandwidth'] / 1e9:.4g} GB/s of memory"
        yield f"copies at {rates['copy_bandwidth'] / 1e9:.3g} GB/s, {rates['launch_seconds'] * 1e6:.3g} us an operator"
    if overhead := found.get("overhead"):
        yield f"in addition to tensors {sum(_mib(overhead).values()):.0f} MiB"
    yield from not_run(rows, lambda row: _NAMES[row["what"]])


def _mib(overhead: dict[str, Any]) -> dict[str, float]:
    return {name: value / MIB for name, value in overhead.items() if name.endswith("_bytes")}


_UNITS = {"flops": (1e12, "TFLOP/s"), "bandwidth": (1e9, "GB/s"), "reading": (1e9, "GB/s"), "reordering": (1e9, "GB/s"),
          "bytes": (MIB, "MiB"), "seconds": (1e-3, "ms")}  # fmt: skip
"""Units of values by the last word of their names; all other values are ratios."""


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Calibration"
    yield ""
    yield "What `sd-lowvram doctor --calibrate` measures, once; plans of the parts below count it. Kernels: how many"
    yield "times as fast as torch's own operators; compile: `torch.compile` of blocks, and the time of a kind of block."
    yield ""
    yield from table(("measured", "", ""), (cells for row in part["rows"] for cells in _cells(row)))


def _cells(row: dict[str, Any]) -> Iterator[list[str]]:
    if not row.get("measured"):
        yield [row["what"], str(row.get("error") or row.get("failed") or "not on this device").replace("|", "/"), ""]
        return
    for name, value in row["measured"].items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            unit, word = _UNITS.get(name.rpartition("_")[2], (1.0, ""))
            yield [row["what"], name.replace("_", " "), f"{value / unit:.4g} {word}".strip()]
