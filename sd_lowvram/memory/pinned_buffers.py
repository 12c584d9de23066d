"""Pinned host memory for the maps that are parked.

Maps come and go in every step, and locking pages takes time: what one map leaves waits for the next one of its size,
for as long as somebody is about to park more. What waits and what is in use are together never more than was in use at
once, which is what plans count.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .pinned import on_shortage, pinnable_bytes, pinned_empty, unlock_ended


@dataclass(eq=False)
class PinnedBuffer:
    """Pinned bytes for one map at a time.

    Attributes:
        copied: end of the last copy of the previous map; the next map waits for it.
    """

    bytes: Tensor
    copied: torch.cuda.Event | None = None


class PinnedBuffers:
    """Pinned buffers in use, and those that are cached for the next map.

    Maps are freed in any thread, even within these functions, so lists and dictionaries are changed by single
    operations only.
    """

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._idle: list[PinnedBuffer] = []
        self._parking: set[object] = set()
        self._taking = threading.Lock()
        self._most = 0

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Cache buffers for the next map within the block; they are freed when the last such block exits."""
        inside = object()
        self._parking.add(inside)
        try:
            yield
        finally:
            self._parking.discard(inside)
            if not self._parking:
                self._most = 0
                self.give_up()

    def take(self, nbytes: int) -> PinnedBuffer | None:
        """Return a buffer of at least ``nbytes`` bytes; None if they cannot be pinned."""
        with self._taking:  # models on several devices share what may be locked
            in_use = sum([*self._used.values()]) + nbytes
            self._most = max(self._most, in_use)
            buffer = next(
                (
                    candidate
                    for candidate in [*self._idle]
                    if len(candidate.bytes) == nbytes and self._is_taken(candidate)
                ),
                None,
            )
            buffer = self._fresh(nbytes, self._most - in_use) if buffer is None else buffer
            if buffer is not None:
                self._used[id(buffer)] = nbytes
            return buffer

    def leave(self, buffer: PinnedBuffer, copied: torch.cuda.Event | None) -> None:
        """Return ``buffer`` for the next map, whose first copy waits for ``copied``."""
        buffer.copied = copied
        self._used.pop(id(buffer), None)
        if self._parking:
            self._idle.append(buffer)

    def give_up(self) -> None:
        """Free the cached buffers."""
        self._idle.clear()
        unlock_ended()

    def _fresh(self, nbytes: int, may_wait: int) -> PinnedBuffer | None:
        """Allocate a new buffer, and free waiting ones down to ``may_wait`` bytes."""
        while self._idle and (self._waiting() > may_wait or nbytes > pinnable_bytes()):
            with contextlib.suppress(IndexError):
                self._idle.pop(0)
        pinned = pinned_empty(nbytes)
        return None if pinned is None else PinnedBuffer(pinned)

    def _waiting(self) -> int:
        return sum([len(buffer.bytes) for buffer in [*self._idle]])

    def _is_taken(self, buffer: PinnedBuffer) -> bool:
        """Take ``buffer`` from those that wait; False where another thread was faster."""
        try:
            self._idle.remove(buffer)
        except ValueError:
            return False
        return True


class PinnedPair:
    """One buffer for two maps at a time, one at each end.

    Of maps of several sizes, each made while the one before it is there, all but the first find their pages locked. A
    map that does not fit next to the other one gets a buffer of its own. Copies of all maps run on one stream.
    """

    def __init__(self, buffers: PinnedBuffers, nbytes: int) -> None:
        """
        Args:
            buffers: give this buffer, and those of maps that do not fit.
            nbytes: of the two largest maps that are there at once.
        """
        self._buffers = buffers
        self._whole = buffers.take(nbytes)
        self._ends: list[PinnedBuffer | None] = [None, None]

    def take(self, nbytes: int) -> PinnedBuffer | None:
        """Return a buffer of ``nbytes`` bytes; None if they cannot be pinned."""
        whole = self._whole
        for end, present in enumerate(self._ends):
            other = self._ends[1 - end]
            beside = 0 if other is None else len(other.bytes)
            if whole is not None and present is None and nbytes + beside <= len(whole.bytes):
                start = (len(whole.bytes) - nbytes) * end
                buffer = self._ends[end] = PinnedBuffer(whole.bytes[start : start + nbytes], whole.copied)
                return buffer
        return self._buffers.take(nbytes)

    def leave(self, buffer: PinnedBuffer, copied: torch.cuda.Event | None) -> None:
        """Return ``buffer`` for the next map, whose first copy waits for ``copied``."""
        if buffer not in self._ends:
            self._buffers.leave(buffer, copied)
            return
        self._ends[self._ends.index(buffer)] = None
        if self._whole is not None and copied is not None:
            self._whole.copied = copied

    def close(self, device: torch.device) -> None:
        """Return the buffer to those that gave it; its next map waits for all copies on the current stream."""
        whole, self._whole = self._whole, None
        if whole is None:
            return
        copied = torch.cuda.Event()
        try:
            with torch.cuda.device(device):
                copied.record()
        finally:
            self._buffers.leave(whole, copied)


PINNED_BUFFERS = PinnedBuffers()
"""The buffers of this process; the limit of pinned memory is per process too."""
on_shortage(PINNED_BUFFERS.give_up)
