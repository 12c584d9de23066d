"""Memory: where bytes live, which of them wait in host memory, and how many there were."""

from __future__ import annotations

from .accounts import current_account, device_account, host_account, is_host, kernels_of, mark_host, weights_account
from .host_offload import Parked, fetch, host_empty, park, send, to_device, to_host
from .measured import measured_peak

__all__ = [
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
    "send",
    "to_device",
    "to_host",
    "weights_account",
]
