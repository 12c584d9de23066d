"""The machine at hand: its rates and what its libraries hold, measured once and remembered between processes."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..cache import cache_folder, recall, remember
from .calibration import calibrate, measured_overhead
from .info import context_memory
from .overhead import Overhead
from .performance import FETCH_ON_CPU, LAYER_ON_CPU, Rates

_Kind = TypeVar("_Kind", Rates, Overhead)


def rates_of(device: torch.device, recalibrate: bool = False) -> Rates:
    """The rates of the machine at hand: measured in some seconds, once, and remembered.

    The host time of our hooks is what ``doctor --calibrate`` has measured, else the default.
    """
    where = place_of_measurement("rates", device)
    rates = None if recalibrate else _read(where, Rates)
    if rates is None:
        rates = calibrate(device)
        remember(where, rates)
    hosts = {name: getattr(Rates, name) for name in HOST_TIME}
    if device.type == "cpu":
        hosts |= {"layer_launches": LAYER_ON_CPU, "fetch_launches": FETCH_ON_CPU}
    stored = stored_measurement("host", device) or {}
    measured = {name: stored[name] for name in HOST_TIME if isinstance(stored.get(name), float)}
    if "fetch_launches" not in measured:  # an earlier version measured layers and fetches as one
        measured.pop("layer_launches", None)
    return dataclasses.replace(rates, **hosts | measured)


HOST_TIME = ("layer_launches", "fetch_launches", "strip_launches", "replay_launches")
"""Rates of our hooks' host time, which are measured by themselves."""


def remember_host_time(device: torch.device, measured: dict[str, float]) -> None:
    remember(place_of_measurement("host", device), measured)


def overhead_of(device: torch.device, recalibrate: bool = False) -> Overhead:
    """Overhead of ``device``, a GPU, as ``doctor --calibrate`` measured it here, else the default."""
    where = place_of_measurement("overhead", device)
    if not recalibrate:
        return _read(where, Overhead) or Overhead()
    measured = measured_overhead(device)
    remember(where, measured)
    knows_cudnn_attention.cache_clear()
    return measured


@functools.cache
def knows_cudnn_attention(device: torch.device) -> bool:
    """True if the memory of cuDNN's attention was measured here. Each call of attention asks."""
    return overhead_of(device).attention_share is not None


def budget_of(device: torch.device, free: int) -> int:
    """The budget if none is stated: all that this process can have of ``device``.

    A plan subtracts the driver's context from every budget. Free memory excludes the context, which exists by now, so
    its bytes are added here.

    Args:
        free: bytes that tensors of the run can have, including those that are on the device already.
    """
    if device.type != "cuda":
        return free
    return free + context_memory(device, overhead_of(device).context_bytes)


RECORDED = "recorded passes"
"""Among what is measured of kernels: replaying them as a CUDA graph."""


def kernel_gains(device: torch.device) -> dict[str, float]:
    """Speed-up of each of our kernels over torch's operators on ``device``; empty without ``doctor --calibrate``."""
    return stored_measurement("kernels", device) or {}


def remember_kernel_gains(device: torch.device, gains: dict[str, float]) -> None:
    remember(place_of_measurement("kernels", device), gains)


def stored_measurement(what: str, device: torch.device) -> dict[str, Any] | None:
    """A measurement of ``device`` as it was remembered; None where there is none, or the device is not at hand."""
    here = device.type == "cpu" or torch.cuda.is_available()
    stored = recall(place_of_measurement(what, device)) if here else None
    return stored if isinstance(stored, dict) else None


def place_of_measurement(what: str, device: torch.device) -> Path | None:
    """The file in which a measurement of ``device`` is remembered; None: nowhere."""
    folder = cache_folder()
    return folder / f"{what}-{_machine(device)}.json" if folder else None


def _read(where: Path | None, kind: type[_Kind]) -> _Kind | None:
    """Cached measurement, if it has all fields of this version."""
    stored = recall(where)
    whole = isinstance(stored, dict) and stored.keys() == {field.name for field in dataclasses.fields(kind)}
    return kind(**stored) if whole else None


def _machine(device: torch.device) -> str:
    title = _name_of(device) if device.type == "cuda" else f"{platform.machine()}-{os.cpu_count()}"
    threads = f"-{torch.get_num_threads()}" if device.type == "cpu" else ""
    return "".join(letter if letter.isalnum() else "-" for letter in f"{title}{threads}-{torch.__version__}")


@functools.cache
def _name_of(device: torch.device) -> str:
    """Asked once: a process that was forked gets no answer from CUDA."""
    return torch.cuda.get_device_name(device)
