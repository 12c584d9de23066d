"""Simulation of a step under a schedule: two engines that wait for each other, one computing, one copying.

Nothing is measured here: bytes, seconds and bandwidth come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Schedule, WeightGroup, spread

_STEPS = 60
"""Enough for what is special about the first steps to pass."""

_READ_COST = 0.1
"""Seconds that are as bad as a second of reading from disk for which the GPU does not wait."""

_COPY_COST = 0.1
"""Seconds that are as bad as a second of copying to the GPU for which it does not wait."""


@dataclass(frozen=True)
class CopyQueue:
    """The cost of copying weights to the device.

    Attributes:
        bandwidth: bytes a second.
        latency: seconds that every fetch costs in addition.
        overlap: True if copies overlap with compute; False if the device is the CPU.
        reading: bytes a second into the ring, for weights in a mapped file or in memory that is not pinned.
        pinned: bytes of streamed weights that need not be read; None: all.
        disk: bytes a second of weights that are in no memory.
        cached: bytes of streamed weights in memory, without pinned ones; None: all.
        host_seconds: by which the step takes longer for each fetch, because the program launches it.
    """

    bandwidth: float
    latency: float = 0.0
    overlap: bool = True
    reading: float = math.inf
    pinned: int | None = None
    disk: float = math.inf
    cached: int | None = None
    host_seconds: float = 0.0

    def seconds(self, size: int, read: int = 0, on_disk: int = 0) -> float:
        """Return the seconds of one fetch.

        The reader thread reads the next chunks while one is copied, so the slower of both counts. A CPU does one after
        the other.

        Args:
            size: bytes of the fetch.
            read: the part of it that is read into the ring of pinned memory.
            on_disk: the part of ``read`` that is read from disk.
        """
        copying, reading = (
            size / self.bandwidth,
            (read - on_disk) / self.reading + on_disk / min(self.disk, self.reading),
        )
        return (max(copying, reading) if self.overlap else copying + reading) + self.latency

    def disk_bytes(self, size: int) -> int:
        """Bytes read from disk, of ``size`` bytes that are streamed in a step."""
        return 0 if self.pinned is None or self.cached is None else max(0, size - self.pinned - self.cached)

    def fetch_seconds(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of each fetch of a step, in order; fetches that are read are spread evenly."""
        taken = [0.0] * len(sizes)
        pinned = math.inf if self.pinned is None else self.pinned
        cached = math.inf if self.cached is None else self.cached
        for number in spread(len(sizes)):
            size = sizes[number]
            read = int(size - min(size, pinned))
            on_disk = int(read - min(read, cached))
            pinned, cached = pinned - (size - read), cached - (read - on_disk)
            taken[number] = self.seconds(size, read, on_disk)
        return taken

    @property
    def fastest(self) -> float:
        """Bytes a second that no fetch exceeds."""
        if self.pinned != 0:
            return self.bandwidth
        slowest = 1 / self.bandwidth, 1 / self.reading
        return 1 / (max(slowest) if self.overlap else sum(slowest))


def simulate(units: Sequence[WeightGroup], schedule: Schedule, copies: CopyQueue) -> float:
    """Return the seconds of one step among many: fetches run ahead into the next step.

    Args:
        units: in the order of use.
        schedule: their places.
        copies: the cost of copies.
    """
    if not copies.overlap:
        fetched = sum(copies.fetch_seconds([units[fetch.unit].bytes for fetch in schedule.fetches]))
        return sum(unit.seconds for unit in units) + fetched + len(schedule.fetches) * copies.host_seconds
    return _Engines(units, schedule, copies).step_seconds()


def simulate_first(units: Sequence[WeightGroup], schedule: Schedule, copies: CopyQueue) -> float:
    """Return the seconds of the first step, which fetches the residents too, all from pinned memory, in their order.

    Args:
        units, schedule, copies: as for :func:`simulate`.
    """
    fetched = copies.fetch_seconds([units[fetch.unit].bytes for fetch in schedule.fetches])
    if not copies.overlap:
        fetches = sum(unit.bytes > 0 for unit in units)
        return sum(unit.seconds + copies.seconds(unit.bytes) for unit in units) + fetches * copies.host_seconds
    streamed = {fetch.unit: (fetch.after, seconds) for fetch, seconds in zip(schedule.fetches, fetched, strict=True)}
    ends: list[float] = []
    clock = copier = 0.0
    for number, unit in enumerate(units):
        after, seconds = streamed.get(number, (number, copies.seconds(unit.bytes) if unit.bytes else 0.0))
        copier = max(copier, ends[after] if after < number else 0.0) + seconds
        clock = max(clock, copier if seconds else 0.0) + unit.seconds + (copies.host_seconds if seconds else 0.0)
        ends.append(clock)
    return clock


def read_cost(size: int, disk: float) -> float:
    """Return the seconds that reading ``size`` bytes from disk counts as, in addition to its time.

    The disk may be slower than assumed, and others use it.

    Args:
        size: bytes.
        disk: bytes a second.
    """
    return _READ_COST * size / disk


def copy_cost(size: int, bandwidth: float) -> float:
    """Return the seconds that copying ``size`` bytes to the device counts as, in addition to its time.

    The bus may be slower than assumed, and each fetch takes time of the host.

    Args:
        size: bytes.
        bandwidth: bytes a second.
    """
    return _COPY_COST * size / bandwidth


def step_cost(units: Sequence[WeightGroup], schedule: Schedule, copies: CopyQueue) -> float:
    """Return the seconds of a step, as :func:`simulate` does, and the cost of what it copies and reads from disk."""
    streamed = sum(units[fetch.unit].bytes for fetch in schedule.fetches)
    return simulate(units, schedule, copies) + transfer_cost(streamed, copies)


def transfer_cost(streamed: int, copies: CopyQueue) -> float:
    """Return the cost of ``streamed`` bytes of a step, which are copied and in part read from disk."""
    return copy_cost(streamed, copies.bandwidth) + read_cost(copies.disk_bytes(streamed), copies.disk)


class _Engines:
    """Clocks of both engines. Streamed units are simulated one by one; the compute between them is one sum."""

    def __init__(self, units: Sequence[WeightGroup], schedule: Schedule, copies: CopyQueue) -> None:
        place = {fetch.unit: index for index, fetch in enumerate(schedule.fetches)}
        taken = copies.fetch_seconds([units[fetch.unit].bytes for fetch in schedule.fetches])
        self.rows = []
        between = 0.0
        for number, unit in enumerate(units):
            if number in place:
                after = schedule.fetches[place[number]].after
                earlier = place[after] if after < number else place[after] - len(place)
                self.rows.append((taken[place[number]], earlier, between, unit.seconds + copies.host_seconds))
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
