"""Two accounts of bytes: the device's and the host's.

On a CPU-only machine both are RAM, and under a trace both are fake CPU tensors, so the device of a tensor does not tell
them apart. What tells them apart is where it was made: new storages belong to the device unless they are made inside
``host_account()``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Literal

import torch

Account = Literal["device", "host"]


class _State(threading.local):
    account: Account = "device"
    traced_device: torch.device | None = None


_state = _State()


def current_account() -> Account:
    """The account that a storage made now, in this thread, belongs to."""
    return _state.account


@contextlib.contextmanager
def _in_account(account: Account) -> Iterator[None]:
    before, _state.account = _state.account, account
    try:
        yield
    finally:
        _state.account = before


def host_account() -> contextlib.AbstractContextManager[None]:
    """Storages made inside count as host memory."""
    return _in_account("host")


def device_account() -> contextlib.AbstractContextManager[None]:
    """Storages made inside count as device memory, also within ``host_account()``."""
    return _in_account("device")


@contextlib.contextmanager
def traced_device(device: torch.device) -> Iterator[None]:
    """While a trace runs, its fake tensors all live on ``device``, whatever device a hook asks for."""
    before, _state.traced_device = _state.traced_device, device
    try:
        yield
    finally:
        _state.traced_device = before


def actual_device(device: torch.device | str) -> torch.device:
    """The device to allocate on when ``device`` is meant: the trace's own while one runs."""
    return _state.traced_device or torch.device(device)
