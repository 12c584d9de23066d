"""How long a step takes under a schedule: two engines that wait for each other, one computing, one copying.

Nothing is measured here: bytes, seconds and bandwidth come from the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from .schedule import Schedule, Unit

_STEPS = 60
"""Enough for any start-up to pass; the average over what follows counts."""


def simulate(
    units: Sequence[Unit], schedule: Schedule, copy_bandwidth: float, latency: float = 0.0, overlap: bool = True
) -> float:
    """Seconds of one step among many: fetches run ahead into the next step.

    Args:
        copy_bandwidth: bytes a second from host to device.
        latency: seconds that every fetch costs besides its bytes.
        overlap: whether copies run beside the compute; not so where the device is the CPU.

    Raises:
        ValueError: a fetch waits for a unit whose own fetch comes later.
    """
    copies = {fetch.unit: units[fetch.unit].bytes / copy_bandwidth + latency for fetch in schedule.fetches}
    compute = sum(unit.seconds + unit.gap for unit in units)
    if not overlap:
        return compute + sum(copies.values())
    ends: list[float] = []
    before = [0.0] * len(units)
    known: dict[tuple[float, ...], tuple[int, float]] = {}
    copier = clock = 0.0
    for step in range(_STEPS):
        start = clock
        ends, clock, copier = _step(units, schedule, copies, before, clock, copier)
        before = ends
        state = tuple(round((end - clock) / compute, 9) if compute else 0.0 for end in (*ends, copier))
        if state in known:
            since, then = known[state]
            return (clock - then) / (step - since)
        known[state] = step, clock
        last = clock - start
    return last


def _step(
    units: Sequence[Unit],
    schedule: Schedule,
    copies: dict[int, float],
    before: list[float],
    clock: float,
    copier: float,
) -> tuple[list[float], float, float]:
    """Ends of all units in one step, the end of the step, and when the copy engine is free again."""
    ready: dict[int, float] = {}
    ends: list[float] = []

    def compute_next() -> None:
        nonlocal clock
        number = len(ends)
        if number in copies:
            if number not in ready:
                raise ValueError(f"the fetch of {units[number].name} comes after one that waits for it")
            clock = max(clock, ready[number])
        ends.append(clock + units[number].seconds)
        clock = ends[-1] + units[number].gap

    for fetch in schedule.fetches:
        if fetch.after < fetch.unit:
            while len(ends) <= fetch.after:
                compute_next()
            free = ends[fetch.after]
        else:
            free = before[fetch.after]
        copier = max(copier, free) + copies[fetch.unit]
        ready[fetch.unit] = copier
    while len(ends) < len(units):
        compute_next()
    return ends, clock, copier
