"""Schedules: which weights stay on the device, where in the ring the rest goes, and when each may be fetched.

A step runs units one after the other; a unit is a layer or a few that are copied as one piece. Units that do not stay
are *streamed*: each has a fixed place in one buffer, the ring, and is fetched there in every step, in the order of
``Schedule.fetches``, as soon as the copy engine is free and the last unit that used any of these bytes has computed.
Because places are fixed, views are made once, nothing fragments, and the device never holds more than the ring.

If the sum of weights and activations is what counts, the ring's size may differ from moment to moment
(``Schedule.rooms``). Units then have no fixed places, and use memory that activations have freed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ..errors import BudgetError
from ..units import format_size

ALIGNMENT = 512
"""Bytes to which places in the ring are rounded: what the CUDA allocator gives, and enough for every kernel."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are copied and used together: a unit of a schedule.

    Attributes:
        name: for people.
        bytes: of its weights, on the device.
        seconds: from the beginning of the unit until the next one begins; its weights are on the device for all of it.
        maps: the most bytes of activations on the device in this time.
    """

    name: str
    bytes: int
    seconds: float
    maps: int = 0


@dataclass(frozen=True)
class Fetch:
    """A copy from host memory into the ring.

    Attributes:
        unit: number of the unit.
        offset: offset of its first byte in the ring.
        after: number of the unit whose end frees the last of these bytes. It computes before ``unit``: in the same
            step where ``after < unit``, else in the step before; in a first step there is nothing to wait for.
    """

    unit: int
    offset: int
    after: int


@dataclass(frozen=True)
class Schedule:
    """Places for the weights of all units.

    Attributes:
        resident: numbers of the units that stay.
        resident_bytes: bytes of the units that stay.
        ring_bytes: size of the ring through which all other units pass.
        fetches: one for every streamed unit, in the order of use, which is the order of issue. The fetches of the next
            step follow immediately: they run while this step's last units compute.
        rooms: bytes of the ring while each unit computes, if the ring follows the activations; then no place is fixed.
            Empty: the ring has ``ring_bytes`` at every moment.
    """

    resident: frozenset[int]
    resident_bytes: int
    ring_bytes: int
    fetches: tuple[Fetch, ...]
    rooms: tuple[int, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at every moment: residents and ring."""
        return self.resident_bytes + self.ring_bytes


def align(size: int) -> int:
    """Round ``size`` up to a multiple of the ring's alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


_GOLDEN = (math.sqrt(5) - 1) / 2


def spread(count: int) -> list[int]:
    """The numbers below ``count``, ordered so that the first N, for any N, are spread evenly among them."""
    return sorted(range(count), key=lambda number: number * _GOLDEN % 1)


def lay_out(units: Sequence[WeightGroup], resident: Collection[int], ring_bytes: int) -> Schedule:
    """Schedule streamed units one after the other around the ring, fetched in the order of their use.

    Args:
        units: in the order of use.
        resident: numbers of the units that stay.
        ring_bytes: size of the ring.

    Returns:
        The schedule. A unit that does not fit behind the previous one begins at the start of the ring.

    Raises:
        BudgetError: a streamed unit is larger than the ring.
    """
    places: list[tuple[int, int, int]] = []
    residents, kept_bytes, head = [], 0, 0
    for number, unit in enumerate(units):
        size = align(unit.bytes)
        if size and number in resident:
            residents.append(number)
            kept_bytes += size
        elif size:
            if size > ring_bytes:
                raise BudgetError(
                    f"{unit.name} has {format_size(size)} of weights and the ring {format_size(ring_bytes)}",
                    needed_bytes=size,
                    stage=unit.name,
                    limit="ring",
                )
            start = 0 if head + size > ring_bytes else head
            head = start + size
            places.append((number, start, head))
    return Schedule(frozenset(residents), kept_bytes, ring_bytes if places else 0, tuple(_fetches(places)))


def follow_maps(units: Sequence[WeightGroup], most: int, ring_bytes: int) -> Schedule:
    """Schedule every unit through a ring that follows the activations.

    While a unit computes, further units are fetched. Until each of them is used, ring and activations together stay
    within ``most`` bytes, and the ring within ``ring_bytes``. A unit that exceeds this is on the device alone.

    Args:
        units: in the order of use, with their activations.
        most: largest sum of ring and activations.
        ring_bytes: largest ring.
    """
    count = len(units)
    sizes = [align(unit.bytes) for unit in units]
    before = [0, *itertools.accumulate(sizes * 3)]
    reach: list[int] = []  # for each unit of two steps, from the last back: the last unit that fits in addition
    for at in reversed(range(2 * count)):
        capacity = min(ring_bytes, most - units[at % count].maps)
        fit = bisect.bisect_right(before, before[at] + capacity) - 2
        reach.append(max(at, min(fit, at + count - 1, *reach[-1:])))
    reach.reverse()
    fetches = []
    for number in (number for number, size in enumerate(sizes) if size):
        free = bisect.bisect_left(reach, number + count) - 1  # the fetch may begin when this unit has computed
        while not sizes[free % count]:
            free -= 1
        fetches.append(Fetch(number, 0, free % count))
    rooms = tuple(before[reach[at] + 1] - before[at] for at in range(count))
    return Schedule(frozenset(), 0, max(rooms, default=0), tuple(fetches), rooms)


def _fetches(places: Sequence[tuple[int, int, int]]) -> Iterator[Fetch]:
    """Fetches from (unit, first byte, end) in the order of use, computed over two steps."""
    turns = [*places, *places]
    below: list[int] = []  # units whose bytes lie below those of the present one; above them
    above: deque[int] = deque()
    for turn, (number, start, stop) in enumerate(turns):
        if start == 0:
            top = turns[below[-1]][2] if below else 0
            above, below = deque([*below, *(used for used in above if turns[used][2] > top)]), []
        while above and turns[above[0]][2] <= start:
            above.popleft()
        below.append(turn)
        if turn >= len(places):
            latest = 0
            for used in above:
                if turns[used][1] >= stop:
                    break
                latest = max(latest, used)
            yield Fetch(number, start, turns[latest][0])
