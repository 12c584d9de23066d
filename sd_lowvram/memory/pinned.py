"""Host memory that is page-locked at its exact size, so that copies to and from the device need not block.

torch rounds pinned memory up to a power of two and never frees it: a map of 65 MiB locks 128 MiB until the process
ends. Here ordinary pages are registered with the driver. :func:`unlock_ended` unlocks them after the last tensor in
them is gone; it waits for the devices, and tensors may end at any moment, so unlocking is a call of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..compat.private import has_context
from ..devices.info import host_memory, own_ram
from ..progress import log_event
from ..units import format_size
from .accounts import host_account

PINNED_SHARE = 0.5
"""Largest share of the free host memory that is pinned. Pinned pages can be neither swapped nor dropped; the file cache
and programs that start later need the rest."""

_PORTABLE = 1
"""cudaHostRegisterPortable: the pages are locked for all devices."""
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

_locked: dict[int, int] = {}
"""Locked bytes by address. Single operations on the dict are atomic, so any thread may unlock pages."""
_ended: list[_Pages] = []
"""Pages that are locked, and nobody holds any longer. Single operations on it are atomic, too."""
_told: set[str] = set()
_cached: list[Callable[[], None]] = []
"""Functions that free pages which are locked, and in use by nobody."""
_locking = threading.Lock()
_waiting = threading.Lock()
"""Lock of the thread that waits for all devices, or that records kernels: a wait would abort the recording."""


def can_pin() -> bool:
    """True if copies to a device are faster from pinned memory: on CUDA; ROCm is known to stall with it."""
    return torch.cuda.is_available() and torch.version.hip is None


def on_shortage(give_up: Callable[[], None]) -> None:
    """Call ``give_up``, which frees cached pinned memory, before memory stays unpinned because the limit is reached."""
    _cached.append(give_up)


def pinned_bytes() -> int:
    """Bytes that are locked now."""
    return sum(list(_locked.values()))


def most_pinned_bytes() -> int:
    """Return the most bytes that this process may lock: a share of free memory and of what it has locked already.

    Weights in ordinary memory are freed as they are locked, so that the number stays the same meanwhile.
    """
    memory = host_memory()
    return int(PINNED_SHARE * min(memory.total, memory.free + own_ram()))


def pinnable_bytes() -> int:
    """The most that may still be locked by this process."""
    unlock_ended()
    return max(0, most_pinned_bytes() - pinned_bytes())


def whole_pages(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def pinned_empty(nbytes: int) -> Tensor | None:
    """Uninitialised pinned bytes, which :func:`unlock_ended` frees when the last tensor in them is gone.

    Return None, and log the reason once, if so many bytes cannot be locked. Ordinary memory is slower and equally
    right.

    Raises:
        MemoryError: the host has no free memory left.
    """
    size = whole_pages(nbytes)
    if size == 0:
        return None
    with _locking:  # the share is of the process, and threads at several devices ask for it
        return _pinned_pages(size, nbytes)


def _pinned_pages(size: int, nbytes: int) -> Tensor | None:
    for give_up in _cached if size > pinnable_bytes() else ():
        give_up()
    if size > pinnable_bytes():
        _tell(f"more than {PINNED_SHARE:.0%} of the RAM that other programs leave would be locked", size)
        return None
    try:
        pages = _Pages(-1, size, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"no {format_size(size)} of host memory: {error.strerror}") from error
    with torch.inference_mode(False), host_account():
        empty = torch.frombuffer(pages, dtype=torch.uint8)
    refused = _lock(empty.data_ptr(), size)
    if refused is not None:
        _tell(refused, size)
        return None
    pages.locked_at = empty.data_ptr()
    return empty[:nbytes]


class _Pages(mmap.mmap):
    """Anonymous pages, held by the tensors in them.

    Attributes:
        locked_at: their address, if they are locked; else 0. The process' end unlocks what is left.
    """

    locked_at = 0

    def __del__(self) -> None:  # runs when the last tensor in these pages is freed
        # The garbage collector may be the caller, in any thread and in the midst of anything.
        if self.locked_at and not sys.is_finalizing():
            _ended.append(self)


def unlock_ended() -> None:
    """Unlock and free pages whose last tensor is gone, after waiting for the copies that are under way.

    While any of our threads records kernels nobody may wait for a device; the pages then stay until the next call.
    """
    if not _ended or _is_recording() or not _waiting.acquire(blocking=False):
        return
    try:
        ended = [_ended.pop() for _ in range(len(_ended))]
        with contextlib.suppress(RuntimeError):  # of a device that has failed: its copies are over
            _wait()
        for pages in ended:
            torch.cuda.cudart().cudaHostUnregister(pages.locked_at)
            _locked.pop(pages.locked_at, None)
    finally:
        _waiting.release()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Prevent all our threads from waiting for devices within the block, which records kernels."""
    with _waiting:
        yield


def _lock(address: int, size: int) -> str | None:
    """Lock pages; returns the driver's reason when it does not."""
    runtime = torch.cuda.cudart()
    with torch.cuda.device(next(_used_devices(), torch.cuda.current_device())):
        error = runtime.cudaHostRegister(address, size, _PORTABLE)
        if error == runtime.cudaError.success:
            _locked[address] = size
            return None
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)  # CUDA reports the error again at the next launch: this one takes it
    return str(runtime.cudaGetErrorString(error))


def _is_recording() -> bool:
    used = torch.cuda.current_device() in _used_devices()
    return used and torch.cuda.is_current_stream_capturing()


def _wait() -> None:
    """Wait until no device has a copy in flight; only their users know which copies touch which pages."""
    for device in _used_devices():
        torch.cuda.synchronize(device)


def _used_devices() -> Iterator[int]:
    """Devices that have a context. Any call to another device would create one, which takes some hundred MiB."""
    return (index for index in range(torch.cuda.device_count()) if has_context(index))


def _tell(why: str, size: int) -> None:
    if why not in _told:
        _told.add(why)
        log_event(
            __name__,
            f"{format_size(size)} of host memory are not page-locked ({why}): copies between them and the GPU no "
            "longer run while it computes",
        )
