"""The largest picture that fits: few sizes are traced, because the least peak grows almost in step with the area."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

from .. import progress
from ..errors import BadInputError, BudgetError
from ..models.anatomy import Anatomy
from ..models.latents import scale_factor
from ..settings import Settings
from .plan import Plan
from .request import Request
from .search import PlanSearch, best_plan

MOST = 16384
"""Pixels of the longer side beyond which nobody looks."""

RATIOS = {"square": (8, 8), "16:9": (16, 9)}
"""Width and height of the smallest size, in latent pixels. Squares come in steps of 64 pixels, which the three halvings
of a UNet divide evenly; 16:9 is exact, in steps of 128x72."""

_GUESS = 3072
"""Side in pixels of the first square of the search. Below it, the part that depends on the size is too small to fit."""

_TRIALS = 8
"""About as many sizes are tried."""


def largest_plans(
    anatomy: Anatomy,
    request: Request,
    settings: Settings,
    approximate: bool = False,
    anatomy_at: Callable[[int, int], Anatomy] | None = None,
) -> dict[str, Plan | None]:
    """Return the plans of the largest sizes that fit.

    Args:
        anatomy: parts of the target.
        request: budgets and device; its own size is not used.
        settings, approximate: as for :func:`.search.make_plan`.
        anatomy_at: from width and height to the anatomy with the calls of a picture of that size, for a pipeline whose
            call is rehearsed. That takes a tenth of the time of the plan, and is exact for each size.

    Returns:
        For every ratio of width to height, the plan of the largest size; None if not even the smallest fits.

    Raises:
        BadInputError: the pipeline's call cannot be rehearsed.
    """
    if request.rehearsal is not None and request.rehearsal.why:
        raise BadInputError(
            "a pipeline that is planned at its first call has no largest size, as its call cannot be rehearsed "
            f"({request.rehearsal.why}): state what it requires as call"
        )
    first = PlanSearch(anatomy, request, settings, approximate)
    report = functools.partial(_report, itertools.count())

    def make_search(width: int, height: int) -> PlanSearch:
        report()
        at = anatomy if anatomy_at is None else anatomy_at(width, height)
        sized = dataclasses.replace(request, width=width, height=height, rehearsal=at.rehearsal)
        return PlanSearch(at, sized, settings, approximate, like=first)

    plans: dict[str, Plan | None] = {}
    area = _GUESS * _GUESS
    for name, (width, height) in RATIOS.items():
        unit = scale_factor(anatomy) * anatomy.family.latent_multiple
        plan = plans[name] = _largest(make_search, width * unit, height * unit, area)
        area = plan.request.width * plan.request.height if plan else area
    _report(itertools.repeat(_TRIALS))
    return plans


def _report(tried: Iterator[int]) -> None:
    progress.report("sizes", min(next(tried), _TRIALS), _TRIALS)


def _largest(searched: Callable[[int, int], PlanSearch], width: int, height: int, area: int) -> Plan | None:
    """The plan of the largest size that is a multiple of ``width`` and ``height``.

    Args:
        searched: the search for a size.
        area: of a picture that may be near it.
    """
    searches: dict[int, PlanSearch] = {}

    def pressure(steps: int) -> float:
        searches[steps] = searched(steps * width, steps * height)
        return _pressure(searches[steps])

    steps = largest(pressure, 1, round(math.sqrt(area / (width * height))), MOST // max(width, height))
    for number in range(steps, 0, -1):
        with contextlib.suppress(BudgetError):  # a whole trace may find more than the sum predicted
            return best_plan(searches.get(number) or searched(number * width, number * height))
    return None


def _pressure(search: PlanSearch) -> float:
    """The least share of the tighter budget that a run needs; above 1 nothing fits.

    Infinite if ``largest_mib`` forbids every run. Roughly a constant plus a part proportional to the area.
    """
    vram, ram = max(1, search.request.vram), max(1, search.request.ram)
    runs = [search.smallest()]
    if runs[0] is not None and runs[0].needed_bytes <= vram and runs[0].least_host_bytes > ram:
        runs.append(search.leanest())
    full = (max(run.needed_bytes / vram, run.least_host_bytes / ram) for run in runs if run is not None)
    return min(full, default=math.inf)


def largest(pressure: Callable[[int], float], limit: float, guess: int, most: int) -> int:
    """Return the largest number from 1 to ``most`` for which ``pressure`` is within ``limit``; 0: there is none.

    Args:
        pressure: function that never falls; it grows about as a constant plus the square, so that a secant finds the
            place.
        limit: largest allowed value.
        guess: where to begin.
        most: largest number to try.
    """
    low, high = 0, most + 1
    seen: list[tuple[int, float]] = []
    while high - low > 1:
        number = max(low + 1, min(high - 1, guess))
        amount = pressure(number)
        low, high = (number, high) if amount <= limit else (low, number)
        if math.isfinite(amount):
            seen.append((number * number, amount))
        guess = _secant(seen, limit) if math.isfinite(amount) else (low + high) // 2
        if len(seen) > _TRIALS:  # the secant does not converge: bisect
            guess = (low + high) // 2
    return low


def _secant(seen: list[tuple[int, float]], limit: float) -> int:
    """The area at which a line through the two points nearest to ``limit`` reaches it."""
    (area, amount), *remaining = sorted(seen, key=lambda point: abs(point[1] - limit))
    if not remaining or remaining[0][1] == amount:
        return math.isqrt(max(1, int(area * limit / amount))) if amount else area
    other, its = remaining[0]
    return math.isqrt(max(1, int(area + (limit - amount) * (other - area) / (its - amount))))
