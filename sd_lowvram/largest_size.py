"""The largest picture that fits: few sizes are traced, because the least peak grows almost in step with the area."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from . import progress
from .models.anatomy import Anatomy
from .planner import Search, make_plan
from .plans import Plan, Request
from .settings import Settings
from .stages import scale_factor

MOST = 16384
"""Pixels of the longer side beyond which nobody looks."""

RATIOS = {"square": (8, 8), "16:9": (16, 9)}
"""Width and height of the smallest size, in latent pixels. Squares come in steps of 64 pixels, which the three halvings
of a UNet divide evenly; 16:9 is exact, in steps of 128x72."""

_TRIALS = 8
"""About as many sizes are tried for each ratio."""


def largest_plans(
    anatomy: Anatomy, request: Request, settings: Settings, approximate: bool = False
) -> dict[str, Plan | None]:
    """For every ratio the plan of the largest size that fits ``request``, whose own size counts for nothing.

    None where not even the smallest size fits.
    """
    plans: dict[str, Plan | None] = {}
    area = request.width * request.height
    for number, (name, (width, height)) in enumerate(RATIOS.items()):
        unit = scale_factor(anatomy)
        smallest = dataclasses.replace(request, width=width * unit, height=height * unit)
        tell = functools.partial(_tell, number * _TRIALS)
        plan = plans[name] = _largest(anatomy, smallest, settings, approximate, area, tell)
        area = plan.request.width * plan.request.height if plan else area
        _tell(number * _TRIALS, _TRIALS)
    return plans


def _tell(before: int, tried: int) -> None:
    progress.report("sizes", before + min(tried, _TRIALS), len(RATIOS) * _TRIALS)


def _largest(
    anatomy: Anatomy,
    smallest: Request,
    settings: Settings,
    approximate: bool,
    area: int,
    tell: Callable[[int], None],
) -> Plan | None:
    """The plan of the largest size that is a multiple of the smallest. ``area``: of a picture that may be near it."""

    def sized(steps: int) -> Request:
        return dataclasses.replace(smallest, width=steps * smallest.width, height=steps * smallest.height)

    tried = itertools.count()

    def needed(steps: int) -> float:
        tell(next(tried))
        return _needed(Search(anatomy, sized(steps), settings, approximate))

    guess = round(math.sqrt(area / (smallest.width * smallest.height)))
    steps = largest(needed, smallest.vram, guess, MOST // max(smallest.width, smallest.height))
    return make_plan(anatomy, sized(steps), settings, approximate) if steps else None


def _needed(search: Search) -> float:
    """The least that the device must have; infinite where host memory or the largest allocation forbid it."""
    smallest = search.smallest()
    if smallest is None:
        return math.inf
    if smallest.needed_bytes > search.request.vram or smallest.host_bytes <= search.request.ram:
        return smallest.needed_bytes
    return search.request.vram if search.fastest(search.request.vram) else math.inf


def largest(needed: Callable[[int], float], limit: float, guess: int, most: int) -> int:
    """The largest number from 1 to ``most`` for which ``needed``, which never falls, is within ``limit``; 0: none.

    Args:
        needed: grows about as a constant and the square of the number, so that a secant finds the place.
        guess: where to begin.
    """
    low, high = 0, most + 1
    seen: list[tuple[int, float]] = []
    while high - low > 1:
        number = max(low + 1, min(high - 1, guess))
        amount = needed(number)
        low, high = (number, high) if amount <= limit else (low, number)
        if math.isfinite(amount):
            seen.append((number * number, amount))
        guess = _secant(seen, limit) if math.isfinite(amount) else (low + high) // 2
        if len(seen) > _TRIALS:  # no line: divide evenly
            guess = (low + high) // 2
    return low


def _secant(seen: list[tuple[int, float]], limit: float) -> int:
    """Where a line through the two points nearest to ``limit`` meets it."""
    (area, amount), *others = sorted(seen, key=lambda point: abs(point[1] - limit))
    if not others or others[0][1] == amount:
        return math.isqrt(max(1, int(area * limit / max(amount, 1))))
    other, its = others[0]
    return math.isqrt(max(1, int(area + (limit - amount) * (other - area) / (its - amount))))
