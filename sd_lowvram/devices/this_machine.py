"""The machine at hand: its rates and what its libraries hold, measured once and remembered between processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..cache import cache_folder
from .calibration import calibrate, measured_overhead
from .overhead import Overhead
from .performance import Rates

_Kind = TypeVar("_Kind", Rates, Overhead)


def rates_of(device: torch.device, recalibrate: bool = False) -> Rates:
    """The rates of the machine at hand: measured in some seconds, once, and remembered."""
    where = _place("rates", device)
    known = None if recalibrate else _read(where, Rates)
    if known is not None:
        return known
    rates = calibrate(device)
    _write(where, dataclasses.asdict(rates))
    return rates


def overhead_of(device: torch.device, recalibrate: bool = False) -> Overhead:
    """What ``device``, a GPU, holds besides tensors: as ``doctor --calibrate`` measured it here, else the default."""
    where = _place("overhead", device)
    if recalibrate:
        measured = measured_overhead(device)
        _write(where, dataclasses.asdict(measured))
        return measured
    return _read(where, Overhead) or Overhead()


def _place(what: str, device: torch.device) -> Path | None:
    """The file in which a measurement of ``device`` is remembered; None: nowhere."""
    folder = cache_folder()
    return folder / f"{what}-{_machine(device)}.json" if folder else None


def _read(where: Path | None, kind: type[_Kind]) -> _Kind | None:
    """What was remembered, if it has all that is measured today."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(where.read_text(encoding="utf-8")) if where else {}
        if set(known) == {field.name for field in dataclasses.fields(kind)}:
            return kind(**known)
    return None


def _write(where: Path | None, values: dict[str, Any]) -> None:
    if where is not None:
        with contextlib.suppress(OSError):
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(json.dumps(values), encoding="utf-8")


def _machine(device: torch.device) -> str:
    title = _name_of(device) if device.type == "cuda" else f"{platform.machine()}-{os.cpu_count()}"
    threads = f"-{torch.get_num_threads()}" if device.type == "cpu" else ""
    return "".join(letter if letter.isalnum() else "-" for letter in f"{title}{threads}-{torch.__version__}")


@functools.cache
def _name_of(device: torch.device) -> str:
    """Asked once: a process that was forked gets no answer from CUDA."""
    return torch.cuda.get_device_name(device)
