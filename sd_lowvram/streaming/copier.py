"""Copies that run beside the compute: a stream of their own, and events in both directions.

Nothing here waits on the host, and nothing synchronises the device. Memory stays the compute stream's; what keeps it
from being overwritten too early, or given away while a copy is under way, are events alone. On a CPU copies are done at
once, and all of this is empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .host_weights import Masters

Copy = tuple[Tensor, Tensor]
"""What a master holds, and where it goes on the device."""


class Copier:
    """Copies what ``masters`` hold to one device."""

    def __init__(self, masters: Masters, device: torch.device) -> None:
        self._masters = masters
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None

    def copy(self, copies: Iterable[Copy], after: Iterable[torch.cuda.Event | None]) -> torch.cuda.Event | None:
        """Copy as soon as all that is in ``after`` has happened; returns the event of the end, None on a CPU."""
        if self._stream is None:
            for source, target in copies:
                self._masters.copy_to(source, target)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        for source, target in copies:
            self._masters.copy_to(source, target, self._stream)
        self._last = self._stream.record_event()
        return self._last

    def mark(self) -> torch.cuda.Event | None:
        """The moment at which what was asked of the compute stream up to now is done."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What is asked of the compute stream from now on happens after ``event``."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def rest(self) -> None:
        """What is asked of the compute stream from now on happens after all copies."""
        self.wait(self._last)
