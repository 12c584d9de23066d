"""Memory: where bytes live (parking), and how many there will be (the trace) or were (the measurement)."""

from __future__ import annotations

from .accounts import current_account, device_account, host_account
from .parking import Parked, fetch, host_empty, park, to_device, to_host

__all__ = [
    "Parked",
    "current_account",
    "device_account",
    "fetch",
    "host_account",
    "host_empty",
    "park",
    "to_device",
    "to_host",
]
