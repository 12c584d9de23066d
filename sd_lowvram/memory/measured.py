"""The peak of a run as the allocator saw it. Shares nothing with the trace that predicts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def measured_peak(function: Callable[[], Any]) -> int:
    """Run ``function`` and return the most bytes that it held at once above what was held at its start.

    On a GPU the figure is that of ``torch.cuda``'s caching allocator (requested sizes rounded to 512 bytes), for the
    current device. Without one it is summed over the events of the CPU allocator, as ``torch.profiler`` records them;
    what is freed but was allocated earlier is not subtracted. Measure in a fresh process to be sure of the figure.
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
    for _, change in sorted(allocator_events(profile), key=lambda event: event[0]):
        live += change
        peak = max(peak, live)
    return peak


def allocator_profile() -> torch.profiler.profile:
    """A profiler of the CPU allocator, to be entered."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def allocator_events(profile: torch.profiler.profile) -> list[tuple[int, int]]:
    """Nanoseconds since the epoch, and change in bytes, of every allocation and release on the CPU."""
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    if events and not hasattr(events[0], "start_ns"):  # before torch 2.4
        return [(1000 * event.start_us(), event.nbytes()) for event in events]
    return [(event.start_ns(), event.nbytes()) for event in events]
