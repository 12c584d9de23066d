"""The search for the schedule with the fastest step, and the lower bound of all schedules.

Deep blocks hold most of the bytes and little of the work, so a step has a stretch in which copies cannot keep up. What
counts is how much of it residents and a ring that is full when it begins can cover, and that the ring leaves space to
copy one unit while another computes. A grid of residents and ring sizes comes near; of few units every set is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from ..errors import BudgetError
from ..units import MIB
from .policies import POLICIES
from .schedule import Schedule, WeightGroup, align, follow_maps, lay_out
from .simulator import CopyQueue, simulate, step_cost, transfer_cost

_FINE = MIB // 4
"""Bytes in which the least for activations and weights is looked for."""
_RINGS = 16
"""Sizes of the ring in the grid, equally spaced in the budget."""
_MOST_SETS = 256
"""Sets of residents that are all tried."""
_NEAR = 1.001
"""A step this close to the bound is not searched further."""


def best_schedule(units: Sequence[WeightGroup], device_bytes: int, copies: CopyQueue, near: bool = False) -> Schedule:
    """Return the fastest schedule found whose residents and ring together stay within ``device_bytes``.

    Of schedules that are nearly as fast, one that copies and reads less is preferred (:func:`step_cost`).

    Args:
        units: in the order of use.
        device_bytes: bytes for weights on the device.
        copies: the cost of copies.
        near: leave out the search through all sets of few units; the schedule may be a little slower.

    Returns:
        A schedule that costs no more than any of :data:`POLICIES`; equal arguments give an equal schedule.

    Raises:
        BudgetError: the largest unit does not fit.
    """
    search = _ScheduleSearch(units, device_bytes, copies)
    search.grid()
    if not near:
        search.try_all_sets()
    return search.best


def smallest_schedule(units: Sequence[WeightGroup], ring: Schedule, copies: CopyQueue) -> Schedule:
    """Return the schedule with the smallest sum of ring and activations whose step is not slower than with ``ring``.

    Args:
        units: in the order of use.
        ring: a schedule that streams all units.
        copies: the cost of copies.

    Returns:
        A schedule that follows the activations within the bytes of ``ring``; ``ring`` itself if none is as fast, or
        activations are unknown.
    """
    if not any(unit.maps for unit in units):
        return ring
    allowed = simulate(units, ring, copies) * (1 + 1e-9)
    most = max(unit.maps for unit in units) + ring.ring_bytes
    least = max(unit.maps + align(unit.bytes) for unit in units)
    best = follow_maps(units, most, ring.ring_bytes)
    while most - least >= _FINE:
        middle = (least + most) // 2
        tried = follow_maps(units, middle, ring.ring_bytes)
        if simulate(units, tried, copies) <= allowed:
            best, most = tried, middle
        else:
            least = middle
    return best


def lower_bound(units: Sequence[WeightGroup], device_bytes: int, copies: CopyQueue) -> float:
    """Return the fewest seconds of a step under any schedule of these units, or of parts of them.

    Consider the time from the start of one unit to the start of a later one. All weights that are used in between must
    be on the device in time, and at most ``device_bytes`` of them can have been there before; the rest is copied in
    this time. A step takes at least as long as the longest chain of such stretches, as the reads from disk, and as all
    units and the fewest fetches that copy the rest.

    Args:
        units: in the order of use.
        device_bytes: bytes for weights on the device.
        copies: the cost of copies.
    """
    total = sum(unit.bytes for unit in units)
    largest = itertools.accumulate(sorted((unit.bytes for unit in units), reverse=True), initial=0)
    fewest = sum(size < total - device_bytes for size in largest)
    compute = sum(unit.seconds for unit in units) + fewest * copies.host_seconds
    rate = copies.fastest
    from_disk = copies.disk_bytes(total - device_bytes) / copies.disk
    if not copies.overlap:
        return compute + max(max(0, total - device_bytes) / rate, from_disk)
    before = [0, *itertools.accumulate(unit.bytes for unit in units)]
    longest: list[float] = []
    first, ahead = 0, -math.inf  # the latest start of copies among stretches of units that begin before `first`
    for last in range(len(units)):
        longest.append(longest[-1] + units[last - 1].seconds if last else 0.0)
        while first < last and before[last + 1] - before[first] > device_bytes:
            ahead = max(ahead, longest[first] - before[first] / rate)
            first += 1
        longest[last] = max(longest[last], ahead + (before[last + 1] - device_bytes) / rate)
    end = longest[-1] + units[-1].seconds if units else 0.0
    return max(end, compute, (total - device_bytes) / rate, from_disk)


class _ScheduleSearch:
    """The best schedule so far, and where to look for better ones."""

    def __init__(self, units: Sequence[WeightGroup], device_bytes: int, copies: CopyQueue) -> None:
        self.units, self.device_bytes, self.copies = units, device_bytes, copies
        self.sizes = [align(unit.bytes) for unit in units]
        self.streamable = [number for number, size in enumerate(self.sizes) if size]
        simple = [policy(units, device_bytes) for policy in POLICIES.values()]
        self.best = min(simple, key=lambda schedule: step_cost(units, schedule, copies))
        self.cost = step_cost(units, self.best, copies)
        least = max(0, sum(unit.bytes for unit in units) - device_bytes)
        self.enough = _NEAR * (lower_bound(units, device_bytes, copies) + transfer_cost(least, copies))

    def grid(self) -> None:
        """Try residents by size, and by size over the time in which they could be copied, with rings of many sizes."""
        by_size = sorted(self.streamable, key=lambda number: -self.sizes[number])
        by_rate = sorted(self.streamable, key=lambda number: -self.sizes[number] / (self.units[number].seconds or 1e-9))
        rings = [int(self.device_bytes * share / _RINGS) for share in range(1, _RINGS)]
        if not self.copies.overlap:  # the smallest buffer is the best, and only the sizes of units can be its size
            rings = sorted(set(self.sizes))
        for order, ring in itertools.product((by_size, by_rate), rings):
            if self.cost <= self.enough:
                return
            self._try(self._fitting_units(order, self.device_bytes - ring))

    def try_all_sets(self) -> None:
        """Try every set of residents, if the units are few."""
        if 2 ** len(self.streamable) <= _MOST_SETS:
            for count in range(len(self.streamable) + 1):
                for chosen in itertools.combinations(self.streamable, count):
                    self._try(chosen)

    def _fitting_units(self, order: Sequence[int], most: int) -> set[int]:
        """Units in ``order``, each that still fits into ``most`` bytes."""
        taken, left = set(), most
        for number in order:
            if self.sizes[number] <= left:
                taken.add(number)
                left -= self.sizes[number]
        return taken

    def _try(self, resident: Collection[int]) -> None:
        """Take ``resident``, with the rest of the budget as the ring, if that costs less than the best so far."""
        ring = self.device_bytes - sum(self.sizes[number] for number in resident)
        if ring < 0:
            return
        try:
            schedule = lay_out(self.units, resident, ring)
        except BudgetError:
            return
        cost = step_cost(self.units, schedule, self.copies)
        if cost < self.cost:
            self.best, self.cost = schedule, cost
