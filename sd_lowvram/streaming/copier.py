"""Copies that overlap with compute: a copy stream, and events in both directions.

Nothing here synchronises the device. The host waits only for bytes that the reader thread still reads from a file. All
memory belongs to the compute stream; events alone prevent that it is overwritten or freed while a copy is in flight. On
a CPU copies are made immediately, and there are no events.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

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


class _Swapped:
    """A block in which another stream of the current device is the current one; entered in a third of torch's time."""

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        self._stream, self._before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)


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

    def copy(
        self, copies: Iterable[Copy], after: Iterable[Moment | None], ended: torch.cuda.Event | None = None
    ) -> Copied | None:
        """Copy as soon as all that is in ``after`` has happened.

        What passes the ring is read by a thread of its own, and so is all that is asked for meanwhile, in order.

        Args:
            copies: the copies.
            after: moments of the compute stream.
            ended: an event to record again; nothing that is still to come may wait for what it stands for.

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
        return self._ask(self._stream, copies, events, ended)

    def _ask(
        self,
        stream: torch.cuda.Stream,
        copies: list[Copy],
        after: Iterable[torch.cuda.Event],
        ended: torch.cuda.Event | None = None,
    ) -> torch.cuda.Event:
        """Empties ``copies``: the thread keeps the list for a while, and would keep what they go to."""
        for event in after:
            stream.wait_event(event)
        with self._entered(stream):
            while copies:
                self._host_weights.copy_to(*copies.pop(0))
        copied: torch.cuda.Event = stream.record_event(ended)
        return copied

    def _entered(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        """A block in which ``stream`` is the current one."""
        home = self._home
        if home is None or not self.is_home_stream or torch.cuda.current_device() != home.device_index:
            return torch.cuda.stream(stream)
        return _Swapped(stream, home)

    def mark(self, moment: Moment | None = None) -> Moment | None:
        """The moment at which what was asked of the compute stream up to now is done; None on a CPU.

        Args:
            moment: one that is no longer needed, whose event is recorded again.
        """
        if self._home is None:
            return None
        if not self.is_home_stream:
            return Moment(torch.cuda.current_stream(self._device).record_event(), 0)
        self._marks += 1
        again = moment.event if moment is not None and moment.number else None
        return Moment(self._home.record_event(again), self._marks)

    def wait(self, copied: Copied | None) -> bool:
        """Make the compute stream wait for ``copied``; re-raise what reading the file raised.

        Returns:
            True if the stream that owns the memory waits, so that nothing else on it has to.
        """
        if copied is None or self._home is None:
            return True
        home = self.is_home_stream
        stream = self._home if home else torch.cuda.current_stream(self._device)
        stream.wait_event(copied.result() if isinstance(copied, Future) else copied)
        return home

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
    last, events = None, []
    for moment in moments:
        if moment is None:
            continue
        if not moment.number:
            events.append(moment.event)
        elif last is None or moment.number > last.number:
            last = moment
    return events if last is None else [*events, last.event]
