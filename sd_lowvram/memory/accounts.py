"""Accounts of bytes: the device's activations, the weights on it, and the host's.

On a CPU-only machine both are RAM, and under a trace both are fake CPU tensors, so the device of a tensor does not set
them apart. What does is where it was made: new storages belong to the device unless they are made inside
``host_account()``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch

from ..compat.private import storage_key
from .storage_refs import Deaths

Account = Literal["device", "weights", "host"]
Kernels = Literal["gpu", "cpu"]


class _ThreadAccounts(threading.local):
    account: Account = "device"
    traced_device: torch.device | None = None
    kernels: Kernels = "gpu"


_state = _ThreadAccounts()


def current_account() -> Account:
    """Return the account to which a storage made now, in this thread, belongs."""
    return _state.account


@contextlib.contextmanager
def _having(**changed: Any) -> Iterator[None]:
    """Set attributes of this thread's state within the block."""
    before = {name: getattr(_state, name) for name in changed}
    vars(_state).update(changed)
    try:
        yield
    finally:
        vars(_state).update(before)


def host_account() -> contextlib.AbstractContextManager[None]:
    """Count storages made inside as host memory."""
    return _having(account="host")


def device_account() -> contextlib.AbstractContextManager[None]:
    """Count storages made inside as device memory, also within ``host_account()``."""
    return _having(account="device")


def weights_account() -> contextlib.AbstractContextManager[None]:
    """Count storages made inside as weights on the device: they are in its peak, but not in the activations' peak."""
    return _having(account="weights")


_host_storages: set[int] = set()
_deaths = Deaths(_host_storages.discard)


def mark_host(tensor: torch.Tensor) -> None:
    """Mark the memory of ``tensor`` as the host's, for later traces, as long as the tensor lives."""
    _deaths.look()
    _host_storages.add(_deaths.watch(tensor.untyped_storage()))


def unmark_host(tensor: torch.Tensor) -> None:
    """Remove the mark of :func:`mark_host`."""
    _host_storages.discard(storage_key(tensor))


def is_host(tensor: torch.Tensor) -> bool:
    """True if the memory of ``tensor`` was marked as the host's."""
    return storage_key(tensor) in _host_storages


def traced_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The device of a trace's fake tensors, whatever device a hook requests; ``device`` itself outside of traces."""
    return _having(traced_device=device)


def tracing() -> bool:
    """True if this thread runs a trace."""
    return _state.traced_device is not None


def actual_device(device: torch.device | str) -> torch.device:
    """Return the device to allocate on: ``device``, or inside a trace the device of its fake tensors."""
    return _state.traced_device or torch.device(device)


def kernels_of(device_type: Kernels) -> contextlib.AbstractContextManager[None]:
    """Trace kernels of this type of device inside: "gpu", as everywhere else, or "cpu"."""
    return _having(kernels=device_type)


def traces_cpu() -> bool:
    """True if traces are of a run on the CPU."""
    return _state.kernels == "cpu"
