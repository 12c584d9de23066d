"""Copies that overlap with compute: a copy stream, and events in both directions.

Nothing here synchronises the device. The host waits only for bytes that the reader thread still reads from a file. All
memory belongs to the compute stream; events alone prevent that it is overwritten or freed while a copy is in flight. On
a CPU copies are made immediately, and there are no events.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from ..compat.private import stream_handle
from .host_weights import HostWeights

Copy = tuple[Tensor, Tensor]
"""The contents of a host weight, and their destination on the device."""

Copied = torch.cuda.Event | Future[torch.cuda.Event]
"""The end of copies; a future where the reader thread still has to ask for them."""


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
        self._read: list[tuple[Future[torch.cuda.Event], list[Copy]]] = []
        self._settle(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def _settle(self, home: torch.cuda.Stream | None) -> None:
        """Take ``home`` for the compute stream that owns the memory, and another one for the copies.

        torch hands out 32 streams in turn: that of a capture may be that of the copies, which would not overlap then.
        """
        while home is not None and self._stream == home:
            self._stream = torch.cuda.Stream(self._device)
        self._home = home
        self._handle = 0 if home is None else int(home.cuda_stream)
        self._swapped = None if self._stream is None or home is None else _Swapped(self._stream, home)

    def copy(
        self, copies: Sequence[Copy], after: Iterable[torch.cuda.Event | None], ended: torch.cuda.Event | None = None
    ) -> Copied | None:
        """Copy as soon as all that is in ``after`` has happened, and all copies of before have ended.

        What passes the ring is read by a thread of its own, and so is all that is asked for meanwhile, in order.

        Args:
            copies: the copies.
            after: events of the compute stream; None: no event.
            ended: an event to record again; nothing that is still to come may wait for what it stands for.

        Returns:
            The end of the copies; None on a CPU.
        """
        if self._stream is None:
            for source, target in copies:
                self._host_weights.copy_to(source, target)
            return None
        events = [event for event in after if event is not None]
        if self._read:
            self._read = [(copied, theirs) for copied, theirs in self._read if not copied.done()]
        if self._read or self._host_weights.pass_ring(copies):
            copies = list(copies)
            copied = self._host_weights.reader().submit(self._ask, self._stream, _emptied(copies), events, None)
            self._read.append((copied, copies))
            return copied
        return self._ask(self._stream, copies, events, ended)

    def _ask(
        self,
        stream: torch.cuda.Stream,
        copies: Iterable[Copy],
        after: Iterable[torch.cuda.Event],
        ended: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        for event in after:
            event.wait(stream)
        at_home = self.is_home_stream and torch.cuda.current_device() == stream.device_index
        with self._swapped if at_home and self._swapped is not None else torch.cuda.stream(stream):
            for source, target in copies:
                self._host_weights.copy_to(source, target)
        ended = torch.cuda.Event() if ended is None else ended
        ended.record(stream)
        return ended

    def mark(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """An event for what was asked of the compute stream up to now; None on a CPU.

        Args:
            event: one that nothing will wait for any longer, which is recorded again.
        """
        if self._home is None:
            return None
        event = torch.cuda.Event() if event is None else event
        event.record(self._home if self.is_home_stream else torch.cuda.current_stream(self._device))
        return event

    def wait(self, copied: Copied | None) -> bool:
        """Make the compute stream wait for ``copied``; re-raise what reading the file raised.

        Returns:
            True if the stream that owns the memory waits, so that nothing else on it has to.
        """
        if copied is None or self._home is None:
            return True
        home = self.is_home_stream
        event = copied.result() if isinstance(copied, Future) else copied
        event.wait(self._home if home else torch.cuda.current_stream(self._device))
        return home

    @property
    def is_home_stream(self) -> bool:
        """True if the current compute stream is the one that owns the memory."""
        return self._home is None or stream_handle(self._home.device_index) == self._handle

    def join(self) -> None:
        """Make the compute stream that owns the memory wait for all copies in flight."""
        if self._stream is not None and self._home is not None:
            self._home.wait_stream(self._stream)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Make the copies within the block a branch of the capture on the current stream."""
        home = self._home
        self._settle(torch.cuda.current_stream(self._device))
        try:
            if self._stream is not None and self._home is not None:
                self._stream.wait_stream(self._home)
            yield
            self.join()
        finally:
            self._settle(home)

    def drain(self) -> None:
        """Cancel queued reads, and make the compute stream, which owns the memory, wait for all copies in flight."""
        if self._stream is None or self._home is None:
            return
        for copied, copies in self._read:
            if copied.cancel():
                copies.clear()
        concurrent.futures.wait([copied for copied, _ in self._read])
        self._read = []
        self.join()


def _emptied(copies: list[Copy]) -> Iterator[Copy]:
    """Yield ``copies`` and drop each: the thread keeps the list for a while, and would keep what they go to."""
    while copies:
        yield copies.pop(0)
