"""The search: from a model, a picture size and a budget to the fastest settings that fit.

A run is a row of stages. For every precision that is allowed and every way to place the weights, each stage takes the
fastest of its options whose peak, with what else is resident then, stays within the budget; the fastest whole wins, and
is traced whole before it is answered. What an option takes is traced when it is first asked for.
Peaks come from tracing the real modules with the real hooks on fake tensors (:mod:`stage_costs`), times from counted
work over the device's rates (:mod:`sd_lowvram.devices.performance`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ..devices.support import check_streaming, support_of
from ..errors import BudgetError, LowVRAMError
from ..hooks.attention import is_worth_choosing
from ..hooks.offload import STREAMED
from ..hooks.precision import precision_fidelity
from ..hooks.registry import applicable
from ..models.anatomy import Anatomy
from ..models.autoencoder import dissect
from ..settings import Fidelity, Settings
from ..streaming.timing import Timing
from ..units import MIB
from .cost_model import Pricing
from .options import Choice, Group, Option, groups, host_of, largest_of, parks, peak_of, seconds_of
from .plan import Candidate, Plan, Predicted, StagePlan
from .reasons import reasons, refusal, too_large, why_not
from .request import DEFAULT_STEPS, Request

__all__ = ["DEFAULT_STEPS", "Plan", "Request", "StagePlan", "fidelity_of", "make_plan"]


def make_plan(anatomy: Anatomy, request: Request, settings: Settings, approximate: bool = False) -> Plan:
    """The fastest settings that fit, traced whole.

    Args:
        settings: knobs that are fixed; the rest is searched.
        approximate: whether a narrower precision may be chosen.

    Raises:
        BudgetError: none fits; it tells the smallest budget that works and the stage that needs it.
    """
    return planned(Search(anatomy, request, settings, approximate))


def planned(search: Search) -> Plan:
    """The plan that ``search`` ends with.

    Raises:
        BudgetError: as :func:`make_plan`.
    """
    anatomy, request = search.pricing.anatomy, search.request
    best = search.confirmed()
    smallest = search.smallest()
    if smallest is None:
        raise search.too_large()
    if best is None:
        held = smallest.needed_bytes <= request.vram
        raise refusal(request, smallest, search.leanest() if held else None)
    smallest = min(smallest, best, key=lambda run: run.peak_bytes)
    worst, following = best.worst, search.next_faster(best)
    predicted = Predicted(
        peak_bytes=worst.peak_bytes,
        overhead_bytes=best.overhead_bytes,
        weights_bytes=worst.weights_bytes,
        activation_bytes=worst.activation_bytes,
        host_bytes=best.host_bytes,
        largest_bytes=best.largest_bytes,
        seconds=best.seconds,
        stage=worst.name,
    )
    return Plan(
        settings=best.settings,
        request=request,
        fits=True,
        predicted=predicted,
        stages=search.explained(best),
        minimum_peak_bytes=smallest.peak_bytes,
        minimum_vram_bytes=smallest.needed_bytes,
        minimum_ram_bytes=smallest.least_host_bytes,
        fidelity=fidelity_of(anatomy, best.settings),
        reasons=reasons(request, best, following),
        next_faster=following,
        timing=search.timing(best),
    )


class Search:
    """Candidates of one request, from the fastest to the smallest."""

    def __init__(
        self, anatomy: Anatomy, request: Request, settings: Settings, approximate: bool, like: Search | None = None
    ) -> None:
        """
        Args:
            like: of the same model and another size, which makes this one faster.
        """
        self.request = request
        settings = applicable(settings, anatomy, request.device)
        self.pricing: Pricing = Pricing(anatomy, request, like.pricing if like else None)
        self.largest = settings.largest_mib * MIB if settings.largest_mib else None
        on_gpu = self.pricing.on_gpu
        self.precisions: list[str | None] = [None]
        if approximate and settings.precision is None:
            self.precisions.append("fp16" if on_gpu else "bf16")
        self.storages: list[str | None] = [None]
        if approximate and self.pricing.costs.quantised:
            self.storages.append("int8")  # nearer to the full weights than fp8, and of the same size
        if settings.weights_mib is not None and anatomy.denoiser is not None:
            settings = settings.filled(offload="blocks")
        if settings.offload in STREAMED:
            check_streaming(request.device, settings.offload)
        self.fixed = settings
        self._decoder_on_cpu = settings.decoder_device in ("cpu", "auto", None) and on_gpu
        if settings.decoder_device == "auto":
            settings = dataclasses.replace(settings, decoder_device=None)
        open_ = settings.attention is None and not settings.deterministic
        chooses = open_ and anatomy.attentions and is_worth_choosing(anatomy, request.device)
        self.base = settings.filled(
            attention="sdpa" if chooses else None,
            inference_mode=True,
            vae_slices=True if request.batch > 1 and anatomy.vae is not None else None,
            channels_last=True if on_gpu and anatomy.denoiser else None,
        )
        tiled = anatomy.vae is not None and dissect(anatomy.vae) is not None
        self._groups = groups(self.pricing.costs.stages, self.base, tiled, self._decoder_on_cpu)
        self._priced: dict[tuple[Settings, str, tuple[Any, ...]], Option] = {}
        self._confirmed: dict[tuple[Settings, str, tuple[Any, ...]], Option] = {}
        self._slower: list[tuple[StagePlan, float]] = []
        self._traced: set[tuple[Settings, str, tuple[Any, ...]]] = set()

    # The fastest

    def confirmed(self) -> Candidate | None:
        """The fastest candidate whose whole trace is within the budget too.

        A whole trace may tell of more bytes, or of more time: its figures then take the place of those that the
        candidate was composed of, and the next ones have their turn as long as they may be faster by what is worth a
        trace.
        """
        best, below = None, math.inf
        while (run := self._fastest(below)) is not None:
            whole = self.pricing.confirmed(run)
            self._correct(run, whole)
            if whole.needed_bytes <= self.request.vram and whole.seconds < below:
                best, below = whole, _WORTH_A_TRACE * whole.seconds
        return best

    def _fastest(self, below: float) -> Candidate | None:
        """The fastest candidate within the budgets that takes less than ``below`` seconds.

        Where the fewest weights are on the device comes first: what is fast enough there is seldom faster with more of
        them, and need not be traced for those.
        """
        best = None
        for base in sorted(self._placements, key=lambda base: base.offload not in STREAMED):
            run = self._fastest_of(base, below)
            if run is not None:
                best, below = run, _FASTER * run.seconds
        return best

    def _fastest_of(self, base: Settings, below: float) -> Candidate | None:
        """The same of those that place the weights as ``base`` says."""
        if self._resident_bytes(base) + self.pricing.overhead > self.request.vram:
            return None
        firsts = [seconds_of(self._option(base, group, group.ladder[0])) for group in self._groups]
        seconds, chosen = sum(firsts), []
        for group, first in zip(self._groups, firsts, strict=True):
            option = self._fastest_option(base, group, below - (seconds - first))
            if option is None:
                return None
            seconds += seconds_of(option) - first
            chosen.append(option)
        return self._run(base, chosen)

    def _fastest_option(self, base: Settings, group: Group, below: float) -> Option | None:
        """The fastest of the ways to run ``group`` that fits, if it takes less than ``below`` seconds."""
        ways = []
        for choice in group.ladder:
            option = self._option(base, group, choice)
            if seconds_of(option) >= below:
                return None
            if self._fits(option):
                ways.append(option)
                break
        if not ways or parks(ways[0]):
            ways += filter(self._fits, (self._option(base, group, choice) for choice in group.detours))
        return min((way for way in ways if seconds_of(way) < below), key=seconds_of, default=None)

    def _correct(self, run: Candidate, whole: Candidate) -> None:
        """Price the options that ``run`` is composed of as they are in ``whole``, and their likes as much slower."""
        base = self._placement_of(run)
        more = [(one, one.seconds - stage.seconds) for stage, one in zip(run.stages, whole.stages, strict=True)]
        self._slower += [(one, seconds) for one, seconds in more if seconds > 0]
        traced = {(stage.name, stage.component): stage for stage in whole.stages}
        for group in self._groups:
            option = tuple(traced[stage.name, stage.component] for stage in group.stages)
            self._confirmed[base, group.name, tuple(option[0].choice.items())] = option

    def _as_slow(self, stage: StagePlan) -> StagePlan:
        """``stage`` with the seconds that whole traces told of beyond what the same was composed of: strips that need
        more weights together than there is room fetch them again, with less room no less often."""
        more = [
            seconds
            for one, seconds in self._slower
            if _is_same(one, stage) and one.choice == stage.choice and one.weights_bytes >= stage.weights_bytes
        ]
        return dataclasses.replace(stage, seconds=stage.seconds + max(more)) if more else stage

    def next_faster(self, best: Candidate) -> Candidate | None:
        """Of the faster candidates that were priced, the one that needs the least more than the budget.

        All that is traced counts where the weights are placed as in ``best``, or with the next larger room.
        """
        here = self._placements.index(self._placement_of(best))
        found = []
        for number, base in enumerate(self._placements):
            known = [self._known(base, group, here <= number <= here + 1) for group in self._groups]
            for chosen in itertools.product(*(filter(self._allowed, options) for options in known)):
                needed, seconds = max(map(self._needed, chosen)), sum(map(seconds_of, chosen))
                if needed > self.request.vram and seconds < best.seconds:
                    found.append((needed, seconds, base, chosen))
        least = min(found, key=lambda run: run[:2], default=None)
        return None if least is None else self._run(*least[2:])

    # The smallest

    def smallest(self) -> Candidate | None:
        """The candidate with the least peak, whatever its time and whatever the budgets.

        None: ``largest_mib`` forbids all.
        """
        found = [self._run(base, [self._least(base, group) for group in self._groups]) for base in self._smallest()]
        return min(filter(None, found), key=lambda run: run.peak_bytes, default=None)

    def _least(self, base: Settings, group: Group) -> Option | None:
        """The way to run a group that holds least on the device."""
        last = self._option(base, group, group.ladder[-1])
        return (
            last if self._small(last) else min(filter(self._small, self._all(base, group)), key=peak_of, default=None)
        )

    def leanest(self) -> Candidate | None:
        """Of the candidates that the device holds, the one with the least in host memory.

        More room for streamed weights leaves no less of them in host memory, and holds no more.
        """
        bases: dict[Any, Settings] = {}
        for base in self._placements:
            bases.setdefault((base.weight_storage, base.precision, base.offload), base)  # the least room comes first
        found = [self._run(base, [self._leanest(base, group) for group in self._groups]) for base in bases.values()]
        return min(filter(None, found), key=lambda run: run.host_bytes, default=None)

    def _leanest(self, base: Settings, group: Group) -> Option | None:
        held = []
        for option in filter(self._small, self._all(base, group)):
            held += [option] if self._needed(option) <= self.request.vram else []
            if held and not parks(held[-1]):  # nothing waits but weights
                break
        return min(held, key=host_of, default=None)

    def pressure(self) -> float:
        """How full the fuller of the two budgets is at the least; above 1 nothing fits.

        Infinite where ``largest_mib`` forbids all. About a constant and a part that grows with the area.
        """
        vram, ram = max(1, self.request.vram), max(1, self.request.ram)
        runs = [self.smallest()]
        if runs[0] is not None and runs[0].needed_bytes <= vram and runs[0].least_host_bytes > ram:
            runs.append(self.leanest())
        full = (max(run.needed_bytes / vram, run.least_host_bytes / ram) for run in runs if run is not None)
        return min(full, default=math.inf)

    def too_large(self) -> BudgetError:
        """That some stage makes an allocation above ``largest_mib`` whatever is chosen."""
        least = []
        for base in self._placements:
            ways = [min(self._all(base, group), key=largest_of) for group in self._groups]
            least.append(max(itertools.chain(*ways), key=lambda stage: stage.largest_bytes))
        return too_large(self.largest or 0, min(least, key=lambda stage: stage.largest_bytes))

    # What there is

    @functools.cached_property
    def _placements(self) -> list[Settings]:
        """The ways to place the weights. One that this model's weights do not allow is no candidate, and ends the
        search only where there is no other."""
        ways = itertools.product(self.storages, self.precisions, self._offloads())  # weights are converted seldom
        found: dict[Settings, None] = {}
        refusal: LowVRAMError | None = None
        for storage, precision, offload in ways:
            base = self.base.filled(weight_storage=storage, precision=precision, offload=offload)
            try:
                self._resident_bytes(base)
                found |= dict.fromkeys(self._with_rooms(base))
            except LowVRAMError as error:
                refusal = refusal or error
        if refusal is not None and not found:
            raise refusal
        return list(found)

    def _smallest(self) -> list[Settings]:
        """Those with the fewest weights on the device: in the last of the ways to offload that can be."""
        return [base for base in self._placements if base.offload == self._placements[-1].offload]

    def _placement_of(self, run: Candidate) -> Settings:
        return self.base.filled(**{name: getattr(run.settings, name) for name in _PLACING})

    def _offloads(self) -> tuple[str, ...]:
        if not support_of(self.request.device).streams:
            return "none", "component"
        streams = self.pricing.anatomy.denoiser is not None
        return ("none", "component", "blocks", "halves", "layer") if streams else ("none", "component", "layer")

    def _with_rooms(self, base: Settings) -> list[Settings]:
        """``base`` with every room for streamed blocks that is tried; the same whatever the budget."""
        denoiser = self.pricing.anatomy.denoiser
        if base.offload != "blocks" or base.weights_mib is not None or denoiser is None:
            return [base]
        weights = self.pricing.costs.weights(denoiser, base)
        rooms = {-(-weights.bytes * share // (_ROOMS[-1] * MIB)) for share in _ROOMS[:-1]}
        least = -(-weights.room_bytes // MIB)
        return [dataclasses.replace(base, weights_mib=room) for room in sorted({least, *rooms}) if room >= least]

    def _resident_bytes(self, base: Settings) -> int:
        """What the weights take on the device at least, whatever the activations."""
        anatomy = self.pricing.anatomy
        away = {anatomy.autoencoder} if self._decoder_on_cpu else set()
        names = [name for name in anatomy.components if name not in away]
        weights = {name: self.pricing.costs.weights(name, base).bytes for name in names}
        sizes = [min(size, anatomy.kept.get(name, size)) for name, size in weights.items()]
        rooms = {"none": sum(sizes), "component": max(sizes, default=0), "blocks": (base.weights_mib or 0) * MIB}
        return rooms.get(base.offload or "none", 0)

    def _option(self, base: Settings, group: Group, choice: Choice) -> Option:
        """What the stages of ``group`` take, priced once."""
        key = base, group.name, tuple(choice.items())
        if key not in self._priced:
            self._priced[key] = tuple(self.pricing.stage(base, stage, choice) for stage in group.stages)
            self._traced.add((_unplaced(base), *key[1:]))
        return self._confirmed.get(key) or tuple(map(self._as_slow, self._priced[key]))

    def _all(self, base: Settings, group: Group) -> Iterator[Option]:
        """All ways to run ``group``, each priced when its turn comes."""
        return (self._option(base, group, choice) for choice in (*group.ladder, *group.detours))

    def _known(self, base: Settings, group: Group, traced: bool) -> list[Option]:
        """Those that were priced before; with ``traced`` those too that take no trace that was not made before."""
        found = []
        for choice in (*group.ladder, *group.detours):
            key = group.name, tuple(choice.items())
            if (base, *key) in self._priced or (traced and (_unplaced(base), *key) in self._traced):
                found.append(self._option(base, group, choice))
        return found

    def _fits(self, option: Option) -> bool:
        return self._needed(option) <= self.request.vram and self._allowed(option)

    def _allowed(self, option: Option) -> bool:
        """Whether all but the device can hold it."""
        return host_of(option) <= self.request.ram and self._small(option)

    def _needed(self, option: Option) -> int:
        return peak_of(option) + self.pricing.overhead

    def _small(self, option: Option) -> bool:
        return self.largest is None or largest_of(option) <= self.largest

    def _run(self, base: Settings, chosen: Sequence[Option | None]) -> Candidate | None:
        found = [option for option in chosen if option is not None]
        return self.pricing.whole(base, itertools.chain(*found)) if len(found) == len(chosen) else None

    # What the plan tells of it

    def timing(self, best: Candidate) -> Timing | None:
        """How long the modules of a step take, where weights are streamed under it."""
        steps = [stage for stage in self.pricing.costs.stages if stage.repeats]
        streamed = best.settings.offload in STREAMED
        return self.pricing.timing(steps[0], best.settings) if streamed and steps else None

    def explained(self, best: Candidate) -> tuple[StagePlan, ...]:
        """The stages of ``best``, each with the reason why it is no faster."""
        base = self._placement_of(best)
        priced = [stage for (placed, _, _), option in self._priced.items() if placed == base for stage in option]
        explained = []
        for stage in best.stages:
            others = [one for one in priced if _is_same(one, stage) and one.choice != stage.choice]
            faster = [one for one in others if one.seconds < stage.seconds]
            nearest = min(faster, key=lambda one: one.peak_bytes, default=None)
            why = why_not(nearest, self.request, self.pricing.overhead, self.largest) if nearest else ""
            explained.append(dataclasses.replace(stage, why=why))
        return tuple(explained)


_FASTER = 1 - 1e-9
"""Part of a time that another is to stay below: sums of the same times in another order are the same time."""

_WORTH_A_TRACE = 0.995
"""Part of the best time that another candidate must promise."""

_PLACING = ("weight_storage", "precision", "offload", "weights_mib")
"""Knobs by which placements differ."""

_ROOMS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""Rooms for streamed blocks that are tried, over the last of them: shares of the denoiser's weights."""


def _unplaced(base: Settings) -> Settings:
    return dataclasses.replace(base, offload=None, weights_mib=None)


def _is_same(one: StagePlan, other: StagePlan) -> bool:
    return (one.name, one.component) == (other.name, other.component)


def fidelity_of(anatomy: Anatomy, settings: Settings) -> Fidelity:
    """The farthest from the model as loaded that any of the settings goes."""
    others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
    return max([precision_fidelity(anatomy, settings), *others])
