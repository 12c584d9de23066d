"""Copies that overlap with compute: a copy stream, and events in both directions.

Nothing here synchronises the device. The host waits only for bytes that the reader thread still reads from a file. All
memory belongs to the compute stream; events alone prevent that it is overwritten or freed while a copy is in flight. On
a CPU copies are made immediately, and there are no events.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from .host_weights import HostWeights

Copy = tuple[Tensor, Tensor]
"""The contents of a host weight, and their destination on the device."""

Copied = Future[torch.cuda.Event]
"""The end of copies, once they have all been asked of their stream."""


class Copier:
    """Copies what ``host_weights`` hold to one device."""

    def __init__(self, host_weights: HostWeights, device: torch.device) -> None:
        self._host_weights = host_weights
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._home = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._read: list[tuple[Copied, list[Copy]]] = []

    def copy(self, copies: Iterable[Copy], after: Iterable[torch.cuda.Event | None]) -> Copied | None:
        """Copy as soon as all that is in ``after`` has happened; returns the end, None on a CPU.

        What passes the ring is read by a thread of its own, and so is all that is asked for meanwhile, in order.
        """
        if self._stream is None:
            for source, target in copies:
                self._host_weights.copy_to(source, target)
            return None
        copies, events = list(copies), [event for event in after if event is not None]
        self._read = [(copied, theirs) for copied, theirs in self._read if not copied.done()]
        if self._read or self._host_weights.pass_ring(source for source, _ in copies):
            copied = self._host_weights.reader().submit(self._ask, self._stream, copies, events)
            self._read.append((copied, copies))
        else:
            copied = Future()
            copied.set_result(self._ask(self._stream, copies, events))
        return copied

    def _ask(
        self, stream: torch.cuda.Stream, copies: list[Copy], after: Sequence[torch.cuda.Event]
    ) -> torch.cuda.Event:
        """Empties ``copies``: the thread keeps the list for a while, and would keep what they go to."""
        for event in after:
            stream.wait_event(event)
        while copies:
            self._host_weights.copy_to(*copies.pop(0), stream)
        ended: torch.cuda.Event = stream.record_event()
        return ended

    def mark(self) -> torch.cuda.Event | None:
        """The moment at which what was asked of the compute stream up to now is done."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def wait(self, copied: Copied | None) -> None:
        """Make the compute stream wait for ``copied``; re-raise what reading the file raised."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied.result())

    @property
    def is_home_stream(self) -> bool:
        """True if the current compute stream is the one that owns the memory."""
        return self._home is None or torch.cuda.current_stream(self._device) == self._home

    def drain(self) -> None:
        """Cancel queued reads, and make the compute stream, which owns the memory, wait for all copies in flight."""
        if self._stream is None or self._home is None:
            return
        for copied, copies in self._read:
            if copied.cancel():
                copies.clear()
        concurrent.futures.wait([copied for copied, _ in self._read])
        self._read = []
        self._home.wait_event(self._stream.record_event())
