"""How long a step takes under a schedule: two engines that wait for each other, one computing, one copying.

Nothing is measured here: bytes, seconds and bandwidth come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .schedule import Schedule, WeightGroup

_STEPS = 60
"""Enough for what is special about the first steps to pass."""


@dataclass(frozen=True)
class CopyQueue:
    """What it costs to bring weights to the device.

    Attributes:
        bandwidth: bytes a second.
        latency: seconds that every fetch costs besides.
        overlap: whether copies run beside the compute; not so where the device is the CPU.
        reading: bytes a second into the ring, where weights wait in a mapped file or in memory that is not pinned.
        pinned: bytes of streamed weights, in the order of a step, that need not be read; None: all.
    """

    bandwidth: float
    latency: float = 0.0
    overlap: bool = True
    reading: float = math.inf
    pinned: int | None = None

    def seconds(self, size: int, read: int = 0) -> float:
        """Of one fetch of ``size`` bytes, of which ``read`` have to be read.

        A thread of its own reads the next chunks while one is copied: the slower of both decides. A CPU does one after
        the other.
        """
        copying, reading = size / self.bandwidth, read / self.reading
        return (max(copying, reading) if self.overlap else copying + reading) + self.latency

    def of_fetches(self, sizes: Iterable[int]) -> Iterator[float]:
        """Seconds of each fetch of a step, in order."""
        left = self.pinned
        for size in sizes:
            read = 0 if left is None else size - min(size, left)
            left = None if left is None else left - (size - read)
            yield self.seconds(size, read)

    @property
    def fastest(self) -> float:
        """Bytes a second that no fetch passes."""
        if self.pinned != 0:
            return self.bandwidth
        slowest = 1 / self.bandwidth, 1 / self.reading
        return 1 / (max(slowest) if self.overlap else sum(slowest))


def simulate(units: Sequence[WeightGroup], schedule: Schedule, copies: CopyQueue) -> float:
    """Seconds of one step among many: fetches run ahead into the next step."""
    if not copies.overlap:
        fetched = sum(copies.of_fetches(units[fetch.unit].bytes for fetch in schedule.fetches))
        return sum(unit.seconds for unit in units) + fetched
    return _Engines(units, schedule, copies).step_seconds()


class _Engines:
    """Both engines' clocks. Only streamed units are looked at one by one; what lies between is one sum."""

    def __init__(self, units: Sequence[WeightGroup], schedule: Schedule, copies: CopyQueue) -> None:
        place = {fetch.unit: index for index, fetch in enumerate(schedule.fetches)}
        taken = list(copies.of_fetches(units[fetch.unit].bytes for fetch in schedule.fetches))
        self.rows = []
        between = 0.0
        for number, unit in enumerate(units):
            if number in place:
                after = schedule.fetches[place[number]].after
                earlier = place[after] if after < number else place[after] - len(place)
                self.rows.append((taken[place[number]], earlier, between, unit.seconds))
                between = 0.0
            else:
                between += unit.seconds
        self.rest = between

    def step_seconds(self) -> float:
        """Run until both engines are as far ahead of each other as they were a step ago."""
        ends: list[float] = []
        clock = copier = spent = 0.0
        for step in range(_STEPS):
            before = [*ends, clock, copier]
            ends, clock, copier = self._step(ends, clock, copier)
            if step == 0:
                continue
            spent_each = [now - then for now, then in zip([*ends, clock, copier], before, strict=True)]
            spent = max(spent_each)  # an engine that falls behind is the one that decides in the end
            if spent - min(spent_each) <= 1e-9 * spent:
                break
        return spent

    def _step(self, before: list[float], clock: float, copier: float) -> tuple[list[float], float, float]:
        """Ends of the streamed units, of the step, and of the last copy. In a first step the ring is full already."""
        ends: list[float] = []
        for copy, earlier, between, seconds in self.rows:
            if earlier >= 0:
                copier = max(copier, ends[earlier]) + copy
            elif before:
                copier = max(copier, before[earlier]) + copy
            clock += between
            clock = max(clock, copier) + seconds
            ends.append(clock)
        return ends, clock + self.rest, copier
