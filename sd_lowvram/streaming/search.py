"""The search for the schedule with the fastest step."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import BudgetError
from .policies import POLICIES
from .schedule import Schedule, Unit
from .simulator import simulate


def best_schedule(
    units: Sequence[Unit], device_bytes: int, copy_bandwidth: float, latency: float = 0.0, overlap: bool = True
) -> Schedule:
    """The fastest schedule whose residents and ring together stay within ``device_bytes``.

    Args:
        copy_bandwidth, latency, overlap: see :func:`simulate`.

    Raises:
        BudgetError: the largest unit does not fit.
    """
    found = []
    for policy in POLICIES.values():
        try:
            found.append(policy(units, device_bytes))
        except BudgetError as error:
            refusal = error
    if not found:
        raise refusal
    return min(found, key=lambda schedule: simulate(units, schedule, copy_bandwidth, latency, overlap))
