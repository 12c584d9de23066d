"""The peak of a run as the allocator saw it. Shares nothing with the trace that predicts it."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..compat.private import AllocationFields


def measured_peak(function: Callable[[], Any]) -> int:
    """Run ``function`` and return the most bytes that it held at once above what was held at its start.

    On a GPU the figure is that of ``torch.cuda``'s caching allocator (requested sizes rounded to 512 bytes), for the
    current device. Without one it is summed over the events of the CPU allocator, as ``torch.profiler`` records them;
    what is freed but was allocated earlier is not subtracted. Measure in a fresh process to be sure of the figure.

    Args:
        function: the work; it takes no arguments.

    Returns:
        Bytes at the peak.
    """
    gc.collect()
    return _peak_on_gpu(function) if torch.cuda.is_available() else _peak_on_cpu(function)


def _peak_on_gpu(function: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(function: Callable[[], Any]) -> int:
    with allocator_profile() as profile:
        function()
    live = peak = 0
    for _, change in allocator_events(profile):
        live += change
        peak = max(peak, live)
    return peak


class _AllocatorProfile(torch.profiler.profile):
    """A profiler of the CPU allocator that writes nothing to the console."""

    def __init__(self) -> None:
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        with _silence_profiler():
            super().start()

    def stop(self) -> None:
        with _silence_profiler():
            super().stop()


def allocator_profile() -> torch.profiler.profile:
    """A profiler of the CPU allocator, to be entered."""
    return _AllocatorProfile()


_LINES = (b"USDT:", b"STAGE:", b"ERROR: External init callback")
"""Beginnings of the lines that Kineto writes to the console by itself; none of them is an error."""
_console = threading.Lock()


@contextlib.contextmanager
def _silence_profiler() -> Iterator[None]:
    """Hold back what is written to the process's standard error inside the block, then write all but Kineto's lines."""
    with _console, tempfile.TemporaryFile() as held:
        try:
            console = os.dup(2)
        except OSError:  # there is none
            yield
            return
        try:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(console, 2)
                held.seek(0)
                for line in held:
                    if not line.startswith(_LINES):
                        os.write(console, line)
        finally:
            os.close(console)


def allocator_events(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """Nanoseconds since the epoch, and change in bytes, of every allocation on the CPU and of its release, in order.

    Releases of older memory are left out, because torch reports them with the size of an earlier allocation at the same
    address.
    """
    waiting: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    events = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if isinstance(fields, AllocationFields) and fields.device.type == "cpu":
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    live: set[int] = set()
    changes = []
    for moment, address, change in sorted(events, key=lambda change: (change[0], -change[2])):
        if change > 0:
            live.add(address)
        elif address not in live:
            continue
        else:
            live.remove(address)
        changes.append((moment, change))
    return changes
