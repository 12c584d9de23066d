"""Copies that overlap with compute: a copy stream, and events in both directions.

Nothing here synchronises the device. The host waits only for bytes that the reader thread still reads from a file. All
memory belongs to the compute stream; events alone prevent that it is overwritten or freed while a copy is in flight. On
a CPU copies are made immediately, and there are no events.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.private import stream_handle
from .host_weights import HostWeights

Copy = tuple[Tensor, Tensor]
"""The contents of a host weight, and their destination on the device."""

Copied = torch.cuda.Event | Future[torch.cuda.Event]
"""The end of copies; a future where the reader thread still has to ask for them."""


class Moment(NamedTuple):
    """A moment of a compute stream.

    Attributes:
        event: recorded there.
        number: rises on the stream that owns the memory, so that a later moment implies the earlier ones; 0 on others.
    """

    event: torch.cuda.Event
    number: int


class Copier:
    """Copies what ``host_weights`` hold to one device."""

    def __init__(self, host_weights: HostWeights, device: torch.device) -> None:
        self._host_weights = host_weights
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._home = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._handle = 0 if self._home is None else int(self._home.cuda_stream)
        self._marks = 0
        self._read: list[tuple[Future[torch.cuda.Event], list[Copy]]] = []

    def copy(self, copies: Iterable[Copy], after: Iterable[Moment | None]) -> Copied | None:
        """Copy as soon as all that is in ``after`` has happened.

        What passes the ring is read by a thread of its own, and so is all that is asked for meanwhile, in order.

        Returns:
            The end of the copies; None on a CPU.
        """
        if self._stream is None:
            for source, target in copies:
                self._host_weights.copy_to(source, target)
            return None
        copies, events = list(copies), _last(after)
        if self._read:
            self._read = [(copied, theirs) for copied, theirs in self._read if not copied.done()]
        if self._read or self._host_weights.pass_ring(source for source, _ in copies):
            copied = self._host_weights.reader().submit(self._ask, self._stream, copies, events)
            self._read.append((copied, copies))
            return copied
        return self._ask(self._stream, copies, events)

    def _ask(
        self, stream: torch.cuda.Stream, copies: list[Copy], after: Iterable[torch.cuda.Event]
    ) -> torch.cuda.Event:
        """Empties ``copies``: the thread keeps the list for a while, and would keep what they go to."""
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            while copies:
                self._host_weights.copy_to(*copies.pop(0))
        ended: torch.cuda.Event = stream.record_event()
        return ended

    def mark(self) -> Moment | None:
        """The moment at which what was asked of the compute stream up to now is done; None on a CPU."""
        if self._home is None:
            return None
        if not self.is_home_stream:
            return Moment(torch.cuda.current_stream(self._device).record_event(), 0)
        self._marks += 1
        return Moment(self._home.record_event(), self._marks)

    def wait(self, copied: Copied | None) -> None:
        """Make the compute stream wait for ``copied``; re-raise what reading the file raised."""
        if copied is None or self._home is None:
            return
        stream = self._home if self.is_home_stream else torch.cuda.current_stream(self._device)
        stream.wait_event(copied.result() if isinstance(copied, Future) else copied)

    @property
    def is_home_stream(self) -> bool:
        """True if the current compute stream is the one that owns the memory."""
        return self._home is None or stream_handle(self._home.device_index) == self._handle

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


def _last(moments: Iterable[Moment | None]) -> list[torch.cuda.Event]:
    """The events that imply all ``moments``."""
    known = [moment for moment in moments if moment is not None]
    last = max((moment.number for moment in known), default=0)
    return [moment.event for moment in known if moment.number in (0, last)]
