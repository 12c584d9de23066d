"""Memory: where bytes live (parking), and how many there will be (the trace) or were (the measurement)."""

from __future__ import annotations

from .accounts import current_account, device_account, host_account, is_host, kernels_of, mark_host, weights_account
from .measured import measured_peak
from .parking import Parked, fetch, host_empty, park, to_device, to_host
from .tracer import MemoryTrace, trace

__all__ = [
    "MemoryTrace",
    "Parked",
    "current_account",
    "device_account",
    "fetch",
    "host_account",
    "host_empty",
    "is_host",
    "kernels_of",
    "mark_host",
    "measured_peak",
    "park",
    "to_device",
    "to_host",
    "trace",
    "weights_account",
]
