"""Seconds of our own code and torch's in the host, separated from those of the device, over the calls of models."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sd_lowvram.patches import set_patch, wrap
from sd_lowvram.session import anatomy_of

clock = time.perf_counter
"""The host's. That of a simulated card, whose kernels run in the host's own threads, stands still while they do."""


@dataclass
class Calls:
    """Every call of a component, in order.

    Attributes:
        host_seconds: until the call returned: Python, torch's own work for each operation, and what it waited for.
        device_seconds: between the events before and after it on the compute stream, gaps included; None on a CPU.
    """

    host_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] | None = None

    def figures(self, combined: Callable[[Sequence[float]], float], first: int = 0) -> dict[str, float | None]:
        """``host_seconds`` and ``device_seconds`` of a row: ``combined`` of the calls from the ``first`` on."""
        device = None if self.device_seconds is None else combined(self.device_seconds[first:])
        return {"host_seconds": combined(self.host_seconds[first:]), "device_seconds": device}


@contextlib.contextmanager
def timed_calls(pipe: Any, device: torch.device, only: str | None = None) -> Iterator[Calls]:
    """Time the calls of ``pipe``'s components, or of ``only`` one, within the block, which fills the result."""
    anatomy, calls = anatomy_of(pipe), Calls()
    with _timing(device, calls) as timed, contextlib.ExitStack() as stack:
        for name, component in anatomy.components.items():
            for entry in anatomy.entries[name] if only in (None, name) else ():
                stack.callback(set_patch(wrap(component, entry, timed, "timed")))
        yield calls


def timed_runs(function: Callable[[], Any], runs: int, device: torch.device) -> dict[str, float | None]:
    """``host_seconds`` and ``device_seconds`` of one call of ``function``, warmed up: medians."""
    calls = Calls()
    with _timing(device, calls) as timed:
        for _ in range(runs + 1):
            timed(function)
    return calls.figures(statistics.median, first=1)


@contextlib.contextmanager
def _timing(device: torch.device, calls: Calls) -> Iterator[Callable[..., Any]]:
    """A function that makes a call and times it; ``calls`` is whole when the block has ended."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = _event(device)
        start = clock()
        result = original(*args, **kwargs)
        calls.host_seconds.append(clock() - start)
        after = _event(device)
        if before is not None and after is not None:
            events.append((before, after))
        return result

    yield timed
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        calls.device_seconds = [before.elapsed_time(after) / 1000 for before, after in events]


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
