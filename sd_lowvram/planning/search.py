"""The search: from a model, a picture size and a budget to the fastest settings that fit.

A run consists of stages: text, the denoising steps, the decode. A candidate is a way to place the weights, and one
option for each stage. An option is a set of knobs, such as exact tiles for the decode; a faster option usually needs
more memory.

The search begins, for every way to place the weights, with the fastest option of each stage. While the run does not
fit, each stage that does not fit takes its next option. Candidates are compared in the order of their times. A stage
with streamed weights is first priced by a sum: its activations, traced with all weights on the device, plus the buffer
of the weights. The first candidate that fits by such sums is traced whole, with its weights streamed. If this candidate
still fits, it is the plan. Before that trace, its buffer grows to fill a budget that the user stated. Options are
traced only when they are reached. Late offers of hooks are tried last, and only if some run that does not fit would be
much faster than the best that fits.

Peaks come from tracing the real modules with the real hooks on fake tensors (:mod:`stage_costs`), times from counted
work over the device's rates (:mod:`sd_lowvram.devices.performance`).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import BudgetError, LowVRAMError, PlanningError
from ..hooks.offers import Offer, OfferKind, Target, add_offers, drop_undecided, left_open, select_kind
from ..hooks.registry import applicable, checked, list_offers
from ..kernels.attention.problem import assume_gpu
from ..models.anatomy import Anatomy
from ..models.support import check_moved
from ..settings import Settings, add_implied, conflict
from ..streaming.simulator import copy_cost, read_cost
from ..units import MIB
from .cost_model import Pricing
from .first_calls import until_denoiser
from .options import Choice, Group, WeightPlacement, groups, weight_ways
from .plan import Candidate, Plan, StagePlan
from .reasons import allocation_error, budget_error, reasons, rejection_reason
from .request import DEFAULT_STEPS, Budget, Request

__all__ = ["DEFAULT_STEPS", "Plan", "Request", "StagePlan", "make_plan"]


def make_plan(
    anatomy: Anatomy, request: Request, settings: Settings, approximate: bool = False, least: bool = True
) -> Plan:
    """Return the fastest settings that fit, with their predicted peak and time.

    Args:
        anatomy: parts of the target, with the types and places of its weights as they are loaded.
        request: the picture, the budgets in bytes, and the rates of the device.
        settings: knobs that are fixed; the search decides the rest.
        approximate: True to allow settings that change the picture.
        least: True to look for the smallest settings too, which may take as long as all the rest. False: the plan's
            minimum is what the plan itself needs.

    Returns:
        The plan. ``next_faster`` is the nearest faster candidate that exceeds the budget.

    Raises:
        BudgetError: nothing fits; the error has the smallest budget that works and the stage that needs it.
    """
    return best_plan(PlanSearch(anatomy, request, until_denoiser(request, settings), approximate), least)


def best_plan(search: PlanSearch, least: bool = True) -> Plan:
    """Return the plan that ``search`` finds.

    Args:
        search: the search of one request.
        least: as for :func:`make_plan`.

    Raises:
        BudgetError: as :func:`make_plan`.
    """
    request = search.request
    best, smallest = _best_and_smallest(search, least)
    smallest = min(smallest, best, key=lambda run: run.needed_bytes)
    following, about = search.next_faster(best), search.pricing.about(best)
    waiting = request.rehearsal is not None and bool(request.rehearsal.waiting)
    return Plan(
        settings=best.settings,
        request=request,
        fits=None if waiting else True,
        predicted=best.predicted,
        stages=tuple(search.explain_stages(best)),
        minimum_peak_bytes=smallest.peak_bytes,
        minimum_vram_bytes=smallest.needed_bytes,
        minimum_ram_bytes=smallest.least_host_bytes,
        reasons=tuple(reasons(request, best, following, about)),
        fidelity=about.fidelity,
        next_faster=following,
        timing=about.timing,
        alike={"vram": search.vram.alike, "ram": search.ram.alike},
    )


def _best_and_smallest(search: PlanSearch, least: bool) -> tuple[Candidate, Candidate]:
    """Return the fastest run that fits, and the one that needs the least device memory.

    Raises:
        BudgetError: nothing fits.
    """
    best = search.fastest()
    smallest = search.smallest() if least or best is None else best
    if smallest is None:
        raise search.allocation_error()
    if best is None:
        smallest = search.smallest_as_traced_whole() or smallest
        best = search.leanest() if search.vram.holds(smallest.needed_bytes) else None
        if best is None or not search.ram.holds(best.host_bytes):
            raise budget_error(search.request, smallest, best)
    if least and search.request.device.type == "cpu" and search.recomputes(smallest):
        smallest = search.smallest_as_traced_whole() or smallest  # a stage that recomputes maps is priced too low
    return best, smallest


class PlanSearch:
    """The search of one request: its candidates, and which of them fit."""

    def __init__(
        self, anatomy: Anatomy, request: Request, settings: Settings, approximate: bool, like: PlanSearch | None = None
    ) -> None:
        """
        Args:
            anatomy, request, settings, approximate: as for :func:`make_plan`.
            like: a search of the same model for another size; its fake copy and traces are reused.
        """
        self.request = request
        check_moved(anatomy.components)
        if anatomy.denoiser is not None:
            settings = add_implied(settings)
        with assume_gpu(request.gpu):
            settings = checked(applicable(settings, anatomy, request.device), anatomy, request.device)
        settings = drop_undecided(settings)
        self.pricing: Pricing = Pricing(anatomy, request, like.pricing if like else None)
        self.vram, self.ram = Budget(request.vram), self.pricing.host.budget
        self._stages, self._denoiser = self.pricing.costs.stages, anatomy.denoiser
        self.largest = settings.largest_bytes
        target = Target(anatomy, request.device, request.rates, request.batch, settings, approximate)
        with assume_gpu(request.gpu):
            self._offers = list_offers(target)
        self._fixed = settings
        self.base = add_offers(settings, select_kind(self._offers, OfferKind.ALWAYS))
        self._groups = groups(self._stages, self.base, self._offers)
        self._rejected: list[Candidate] = []
        late = select_kind(self._offers, OfferKind.LATE)
        self._late_offers = [offer for offer in late if left_open(offer.knobs, settings) == offer.knobs]
        self._beyond_as_whole: list[Candidate] = []
        self._unfilled: dict[Settings, Settings] = {}

    # The fastest

    def fastest(self) -> Candidate | None:
        """Return the fastest candidate that fits when it is traced whole; None if none does.

        A whole trace may find more bytes, or more seconds, than the sum by which a candidate was priced. Its figures
        replace the sum. The search then continues with the next candidates, as long as one may be faster by
        enough to be worth a trace.
        """
        best = self._faster(map(self._runs, [*self._placements, *self._variants]), None)
        for offer in self._late_offers:
            best = best and self._faster([self._late(offer, best)], best)
        return best

    def _faster(self, ways: Iterable[Iterator[Candidate]], best: Candidate | None) -> Candidate | None:
        """Return the fitting candidate of ``ways`` that costs the fewest seconds, or ``best`` if none costs fewer.

        Each way yields candidates from the fastest on. Times are rounded to 9 digits: float sums depend on order, and
        ties must stay ties.
        """
        least = math.inf if best is None else self._cost(best)
        for run in heapq.merge(*ways, key=lambda run: _digits(run.seconds)):
            if run.seconds >= least:
                break
            if not self._fits(run):
                self._rejected.append(run)
                continue
            whole = self._whole(run, least)
            if whole is not None and _digits(self._cost(whole)) < _digits(least):
                best, least = whole, self._cost(whole)
        return best

    def _whole(self, run: Candidate, most_seconds: float) -> Candidate | None:
        """Trace ``run`` whole, first with its buffer filled; return the first that fits, None if none does.

        If a filled run does not fit, the next buffer is smaller by what the whole trace found besides. A run is not
        traced if it would cost nearly ``most_seconds``.
        """
        besides = 0
        for tries in range(_TRIES + 1):
            candidate = self._filled(run, besides) if tries < _TRIES else run
            if self.pricing.streams(run.settings) and self._cost(candidate) >= _WORTH_A_TRACE * most_seconds:
                return None
            whole = self.pricing.confirm(candidate, most_seconds)
            if self._fits(whole):
                return whole
            self._beyond_as_whole.append(whole)
            if candidate is run:
                break
            besides += self._step_bytes(whole) - self._step_bytes(candidate)
        return None

    def _filled(self, run: Candidate, besides: int) -> Candidate:
        """Return ``run`` with the largest buffer for streamed weights that a stated budget holds; ``run`` itself if it
        costs less.

        A run that copies or reads less may be a little slower (:func:`.copy_cost`, :func:`.read_cost`). Sizes are
        multiples of 64 MiB, and the budget is asked for each: the plan is valid for an interval of budgets.

        Args:
            run: fits by its sums.
            besides: bytes that a whole trace has found beside the sums.
        """
        name = next((name for name in self._filled_knobs if getattr(run.base, name) is not None), "")
        if not name or self._denoiser is None:
            return run
        size, most = getattr(run.base, name), self.pricing.costs.weights(self._denoiser, run.base).bytes // MIB
        beside = self._step_bytes(run) + besides + run.overhead_bytes - size * MIB
        larger = range(size - size % _FILLED_MIB + _FILLED_MIB, most + 1, _FILLED_MIB)
        held = list(itertools.takewhile(lambda size: self.vram.holds(beside + size * MIB), larger))
        for filled in self._larger(run, name, held):
            if self._fits(filled):
                self._unfilled[filled.base] = run.base
                return filled
        return run

    def _larger(self, run: Candidate, name: str, sizes: Sequence[int]) -> Iterator[Candidate]:
        """Yield ``run`` with buffers of ``sizes``, the largest first, as long as it costs no more.

        Then with the smallest that spares the disk: a larger one takes longer to fill before the first step.
        """
        most = _digits(self._cost(run))
        for size in sizes[: -1 - _TRIES : -1]:
            filled = self._with_buffer(run, name, size)
            if _digits(self._cost(filled)) > most:
                break
            yield filled
        if self._read_bytes(run):

            def spares(size: int) -> bool:
                return not self._read_bytes(self._with_buffer(run, name, size))

            first = bisect.bisect_left(sizes, True, key=spares)
            sparing = (self._with_buffer(run, name, size) for size in sizes[first : first + 1])
            yield from (filled for filled in sparing if _digits(self._cost(filled)) <= most)

    def _with_buffer(self, run: Candidate, name: str, size_mib: int) -> Candidate:
        """Return ``run`` with ``size_mib`` as the knob ``name``."""
        changed: dict[str, Any] = {name: size_mib}
        base = dataclasses.replace(run.base, **changed)
        return self.pricing.whole(base, self._options(base, [_choice(run, group) for group in self._groups]))

    def _cost(self, run: Candidate) -> float:
        """Return the seconds of ``run``, and the cost of what it copies in its steps and reads from disk."""
        read, bandwidth = self._read_bytes(run), self.request.rates.copy_bandwidth
        cost = run.seconds + copy_cost(self.pricing.streamed_bytes(run), bandwidth)
        return cost + (read_cost(read, self.pricing.host.disk) if read else 0.0)

    def _read_bytes(self, run: Candidate) -> int:
        """Return the bytes that ``run`` reads from disk, all steps together."""
        stages = zip(self._stages, run.stages, strict=True)
        return sum(priced.disk_bytes * (self.request.steps if stage.repeats else 1) for stage, priced in stages)

    def _step_bytes(self, run: Candidate) -> int:
        """The most bytes that a stage of each step reserves."""
        stages = zip(self._stages, run.stages, strict=True)
        return max(priced.reserved_bytes for stage, priced in stages if stage.repeats)

    @functools.cached_property
    def _filled_knobs(self) -> set[str]:
        """Knobs with sizes of buffers that the search may enlarge to fill the budget."""
        offers = select_kind(self._offers, OfferKind.WEIGHTS) if self.request.fills else []
        return {offer.mib_knob for offer in offers if offer.mib_knob and getattr(self._fixed, offer.mib_knob) is None}

    def _late(self, offer: Offer, best: Candidate) -> Iterator[Candidate]:
        """Yield ``best`` with a late offer, if a run that does not fit would be much faster than ``best``."""
        rejected = [*self._rejected, *self._beyond_as_whole]
        if any(run.seconds < _WORTH_MORE_TRACES * best.seconds for run in rejected):
            yield from filter(None, [self._apply_late(offer, best)])

    def _apply_late(self, offer: Offer, run: Candidate) -> Candidate | None:
        """Return ``run`` with the knobs of a late offer in the stages that the offer changes.

        Return None if ``run`` has not reached the offer's level, or if the knobs change nothing or conflict with
        other knobs.
        """
        chosen = [(group, _choice(run, group)) for group in self._groups]
        if not offer.is_late_in(self._offers, run.settings):
            return None
        mine = [(group, {**choice, **offer.knobs} if offer in group.offers else choice) for group, choice in chosen]
        if mine == chosen or not all(group.goes_with(choice, run.base) for group, choice in mine):
            return None
        return self.pricing.whole(run.base, [self._option(run.base, *place) for place in mine])

    def _runs(self, base: Settings) -> Iterator[Candidate]:
        """Yield runs with the weights placed as ``base`` says, fastest first, up to the first that fits.

        If the weights alone do not fit, no further run is yielded.
        """
        left = [self._fastest_first(base, group) for group in self._groups]
        chosen = [choice for choices in left if (choice := next(choices, None)) is not None]
        while len(chosen) == len(left):
            yield (run := self.pricing.whole(base, self._options(base, chosen)))
            fits = list(map(self._fits, self._options(base, chosen)))  # again: a whole trace may have replaced sums
            if all(fits) or not self.vram.holds(run.weights_bytes + run.overhead_bytes):
                return
            try:
                ways = zip(chosen, fits, left, strict=True)
                chosen = [choice if fit else next(choices) for choice, fit, choices in ways]
            except StopIteration:
                return

    def _fastest_first(self, base: Settings, group: Group) -> Iterator[Choice]:
        """Yield the ways to run ``group``, from the fastest on. All ways of a tier are priced when the first of them is
        needed.
        """
        for tier in group.tiers:
            possible = [choice for choice in tier if group.goes_with(choice, base)]
            yield from sorted(possible, key=lambda choice: self._option(base, group, choice).seconds)

    def next_faster(self, best: Candidate) -> Candidate | None:
        """Return the rejected run that is faster than ``best`` and exceeds the device's budget by the fewest bytes.

        Returns:
            The run; None if there is none.
        """
        beyond = [run for run in self._rejected if run.needed_bytes > self.request.vram and run.seconds < best.seconds]
        faster = [run for run in beyond if run.host_bytes <= self.request.ram and self._small(run)]
        return min(faster, key=lambda run: (run.needed_bytes, run.seconds), default=None)

    # The smallest

    def smallest(self) -> Candidate | None:
        """Return the run with the least peak, whatever its time and whatever the budgets.

        Returns:
            The run; None if every run exceeds the limit for a single allocation.
        """
        run = self._least(self._fewest, "needed_bytes", self._small, lambda group: [group.smallest])
        return run if run is not None else self._least(self._fewest, "needed_bytes", self._small)

    def smallest_as_traced_whole(self) -> Candidate | None:
        """Return the result of :meth:`smallest` by whole traces, which is slower.

        A budget of the memory that this run needs is enough for a plan.
        """
        return self._settle(self.smallest)

    def recomputes(self, run: Candidate) -> bool:
        """Return True if a stage that runs once has the highest peak, or nearly the highest.

        Such a stage may recompute maps; its price as a sum is then too low.
        """
        near = _NEARLY * run.worst.reserved_bytes
        pairs = zip(self._stages, run.stages, strict=True)
        return any(planned.reserved_bytes >= near and not stage.repeats for stage, planned in pairs)

    def leanest(self) -> Candidate | None:
        """Return the run with the least host memory among those that fit the device when traced whole; None if none
        fits.
        """
        least_rooms = {self._ways[placement]: placement for placement in reversed(self._placements)}
        for bases in (least_rooms.values(), self._fewest):
            run = self._settle(functools.partial(self._least, bases, "host_bytes", self._fits_device))
            if run is not None:
                return run
        return None

    def _settle(self, find: Callable[[], Candidate | None]) -> Candidate | None:
        """Call ``find``, trace the run that it returns as a whole, and repeat until the run stays the same."""
        run, priced = find(), None
        while run is not None and run != priced:
            self.pricing.confirm(run)
            run, priced = find(), run
        return run

    def allocation_error(self) -> BudgetError:
        """Return the error for a limit on single allocations that no settings meet."""
        run = self._least(self._placements, "largest_bytes", lambda _: True)
        assert run is not None
        return allocation_error(int(self.largest), max(run.stages, key=lambda stage: stage.largest_bytes))

    def _least(
        self,
        bases: Iterable[Settings],
        name: str,
        allowed: Callable[[Candidate], bool],
        ways: Callable[[Group], list[Choice]] = lambda group: group.choices,
    ) -> Candidate | None:
        """Return the run with the smallest attribute ``name``.

        Args:
            bases: the weight placements to compare.
            name: an attribute of a candidate.
            allowed: True for an option that the run may use.
            ways: the choices of a group to compare.
        """
        size, runs = operator.attrgetter(name), []
        for base in bases:
            options = (
                [self._option(base, group, choice) for choice in ways(group) if group.goes_with(choice, base)]
                for group in self._groups
            )
            allowed_options = [list(filter(allowed, each)) for each in options]
            runs += (
                [self.pricing.whole(base, [min(each, key=size) for each in allowed_options])]
                if all(allowed_options)
                else []
            )
        return min(runs, key=size, default=None)

    # Placements and options

    @property
    def _placements(self) -> list[Settings]:
        """Settings for each way to place the weights."""
        return list(self._ways)

    @functools.cached_property
    def _fewest(self) -> list[Settings]:
        """The placements that hold the fewest bytes of weights on the device."""
        ways = self._ways.values()
        return [base for base in self._placements if self._ways[base].least or not any(way.least for way in ways)]

    @functools.cached_property
    def _ways(self) -> dict[Settings, WeightPlacement]:
        """Settings for each way to place the weights, mapped to that way.

        A way that the model's weights do not allow is skipped. Its error is raised only if no other way is left.
        """
        placements: dict[Settings, WeightPlacement] = {}
        refused: LowVRAMError | None = None
        for way in weight_ways(self._offers, self._fixed):
            base = self.base.filled(**way.knobs)
            if conflict(base) is not None:
                continue
            try:
                self.pricing.weights_bytes(base)
                placements |= dict.fromkeys(self._buffer_sizes(base, way.mib_knob), way)
            except PlanningError:
                raise
            except LowVRAMError as error:
                refused = refused or error
        if refused is not None and not placements:
            raise refused
        return placements

    @functools.cached_property
    def _variants(self) -> list[Settings]:
        """The placements again, each combined with every offer for whole runs."""
        wholes = select_kind(self._offers, OfferKind.WHOLE)
        bases = (self._combine(offer, base) for offer in wholes for base in self._ways)
        return list(dict.fromkeys(base for base in bases if base is not None))

    def _combine(self, offer: Offer, base: Settings) -> Settings | None:
        """Combine a placement with an offer for whole runs; return None if they exclude each other."""
        way = self._ways[base]
        room = {way.mib_knob: getattr(base, way.mib_knob)} if way.mib_knob else {}
        whole = self._fixed.filled(**offer.knobs).filled(**way.knobs).filled(**room)
        return add_offers(whole, select_kind(self._offers, OfferKind.ALWAYS)) if conflict(whole) is None else None

    def _buffer_sizes(self, base: Settings, mib_knob: str) -> list[Settings]:
        """Return one copy of ``base`` for each buffer size to try. The sizes do not depend on the budget.

        Args:
            mib_knob: the knob that sets the buffer for streamed weights, in MiB; "": no size is tried.
        """
        if not mib_knob or getattr(base, mib_knob) is not None or self._denoiser is None:
            return [base]
        weights = self.pricing.costs.weights(self._denoiser, base)
        sizes = {-(-weights.bytes * share // (_SHARES[-1] * MIB)) for share in _SHARES[:-1]}
        rooms = (sum(self.pricing.costs.weights(name, base).room_bytes for name in group) for group in self._steps)
        least = -(-max(weights.room_bytes, *rooms) // MIB)
        return [base.filled(**{mib_knob: size}) for size in sorted({least, *sizes}) if size >= least]

    @property
    def _steps(self) -> tuple[tuple[str, ...], ...]:
        """Groups of models that share a buffer in every step, if the run was rehearsed."""
        return self.pricing.anatomy.steps if self.pricing.anatomy.rehearsal is not None else ((),)

    def _option(self, base: Settings, group: Group, choice: Choice) -> Candidate:
        settings = base.filled(**choice)
        priced = tuple(self.pricing.stage(settings, stage, choice, base) for stage in group.stages)
        return Candidate(settings, priced, self.request.overhead_bytes, base)

    def _options(self, base: Settings, chosen: Iterable[Choice]) -> list[Candidate]:
        return [self._option(base, *each) for each in zip(self._groups, chosen, strict=True)]

    def _fits(self, run: Candidate) -> bool:
        return self._fits_device(run) and self.ram.holds(run.host_bytes)

    def _fits_device(self, run: Candidate) -> bool:
        """True if the run fits on the device."""
        return self.vram.holds(run.needed_bytes) and self._small(run)

    def _small(self, run: Candidate) -> bool:
        return run.largest_bytes <= self.largest

    # Parts of the plan

    def explain_stages(self, best: Candidate) -> Iterator[StagePlan]:
        """Yield the stages of ``best``, each with the reason why it is not faster."""
        stages = {(stage.name, stage.component): stage for stage in self._stages}
        # With a filled buffer, only the chosen options were priced: price the others with it too.
        for other in self.pricing.priced_stages(self._unfilled.get(best.base, best.base)):
            settings, stage = best.base.filled(**other.choice), stages[other.name, other.component]
            self.pricing.stage(settings, stage, other.choice, best.base)
        priced = self.pricing.priced_stages(best.base)
        for planned in best.stages:
            others = [
                other_stage
                for other_stage in priced
                if (other_stage.name, other_stage.component) == (planned.name, planned.component)
            ]
            record = self.request.rehearsal
            waits = record is not None and record.waits_for(planned.component, planned.name)
            why = "" if waits else rejection_reason(planned, others, self.request, self.largest)
            yield dataclasses.replace(planned, why=why, at_first_call=waits)


def _digits(seconds: float) -> float:
    """``seconds`` with 9 digits, so that sums in another order are equal."""
    return float(f"{seconds:.9g}")


def _choice(run: Candidate, group: Group) -> Choice:
    """The choice of ``run`` for the stages of ``group``."""
    first = group.stages[0]
    return next(stage.choice for stage in run.stages if (stage.name, stage.component) == (first.name, first.component))


_WORTH_A_TRACE = 0.995
"""Another run is traced only if its predicted time is below this fraction of the best time."""

_WORTH_MORE_TRACES = 0.95
"""Late offers are tried if a run that does not fit needs less than this fraction of the best time."""

_NEARLY = 0.8
"""A stage with this fraction of the highest peak may turn out to be the highest when it is traced whole."""

_FILLED_MIB = 64
"""Step in which a buffer grows to fill a stated budget."""

_TRIES = 2
"""Sizes that are tried, from the largest on, if what a stage reserves is more than the sum with its buffer."""

_SHARES = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""Buffer sizes to try for streamed blocks, in sixteenths of the denoiser's weights."""
