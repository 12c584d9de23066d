"""The search: from a model, a picture size and a budget to the fastest settings that fit.

A run is a row of stages. For every precision that is allowed and every way to place the weights, each stage takes the
fastest of its options whose peak, with what else is resident then, stays within the budget; the fastest whole wins.
Peaks come from tracing the real modules with the real hooks on fake tensors (:mod:`stage_costs`), times from counted
work over the device's rates (:mod:`sd_lowvram.devices.performance`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..devices.support import check_streaming, support_of
from ..errors import BudgetError, LowVRAMError
from ..hooks.offload import STREAMED
from ..hooks.precision import precision_fidelity
from ..hooks.registry import applicable
from ..models.anatomy import Anatomy
from ..models.autoencoder import dissect
from ..settings import Fidelity, Settings
from ..streaming.timing import Timing
from ..units import MIB
from .ahead import meanwhile
from .cost_model import Pricing
from .options import GROUPS, Option, Rungs, host_of, largest_of, seconds_of
from .plan import Candidate, Plan, Predicted, StagePlan
from .reasons import reasons, refusal, too_large, why_not
from .request import DEFAULT_STEPS, Request
from .seeking import Seeking, Steps
from .stages import Stage

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
    search.weigh_weights()
    with meanwhile(search.weigh_what_comes_late):
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
        self.tiled = anatomy.vae is not None and dissect(anatomy.vae) is not None
        self.decoder_on_cpu = settings.decoder_device in ("cpu", "auto", None) and on_gpu
        if settings.decoder_device == "auto":
            settings = dataclasses.replace(settings, decoder_device=None)
        sees = anatomy.attentions and settings.attention is None and not settings.deterministic
        self.base = settings.filled(
            attention="sdpa" if sees else None,
            inference_mode=True,
            vae_slices=True if request.batch > 1 and anatomy.vae is not None else None,
            channels_last=True if on_gpu and anatomy.denoiser else None,
        )
        self._known: dict[tuple[Settings, str, tuple[Any, ...]], Option] = {}
        self._traced: set[tuple[Settings, str, tuple[Any, ...]]] = set()

    def _fastest_of(self, base: Settings, limit: int) -> Steps[Candidate | None]:
        """The fastest candidate within ``limit`` bytes, the driver's share counted, weights placed as in ``base``."""
        if self._weights_alone(base) + self.pricing.overhead > limit:
            return None
        told = 0.0
        held, fits = (functools.partial(one, limit=limit) for one in (self._held, self._fits))
        sought = [Seeking(rungs.fastest(held, fits), seconds_of) for rungs in self._rungs(base)]
        while waiting := [one for one in sought if one.is_open]:
            least = sum(one.least for one in sought)
            if least == math.inf:
                return None
            if least > told:
                told = least
                yield least
                for one in waiting:  # what was traced for other placements
                    one.go_on(far=False)
            else:
                waiting[0].go_on()
        return self._whole(base, [one.found for one in sought])

    def _fastest_known(self, limit: int) -> Candidate | None:
        """The fastest within ``limit`` bytes of what has been weighed so far, the weights placed in any way."""

        def first(rungs: Rungs) -> Option | None:
            return min((one for one in rungs.known() if self._fits(one, limit)), key=seconds_of, default=None)

        found = [self._whole(base, list(map(first, self._rungs(base)))) for base in self._placements]
        return min(filter(None, found), key=lambda run: run.seconds, default=None)

    def confirmed(self) -> Candidate | None:
        """The fastest candidate whose whole trace is within the budget too.

        A whole trace may tell of more bytes, or of more time: then the next ones have their turn, as long as they may
        be faster by what is worth a trace.
        """
        best: Candidate | None = None
        waiting = [(base, self._seeking(base, self.request.vram)) for base in self._placements]
        seen: list[tuple[StagePlan, StagePlan]] = []
        while waiting:
            turn = base, seeking = min(waiting, key=lambda each: (each[1].least, each[1].is_open))
            worth = math.inf if best is None else _WORTH_A_TRACE * best.seconds
            if seeking.least >= worth:
                break
            if seeking.is_open:
                seeking.go_on()
                continue
            waiting.remove(turn)
            run = seeking.found
            assert run is not None
            if run.seconds + sum(_seen_beyond(stage, seen) for stage in run.stages) < worth:
                whole = self.pricing.confirmed(run)
                seen += zip(run.stages, whole.stages, strict=True)
                fits = whole.needed_bytes <= self.request.vram
                if fits and (best is None or whole.seconds < best.seconds):
                    best = whole
                if fits and whole.seconds <= run.seconds:
                    continue
            waiting.append((base, self._seeking(base, run.needed_bytes - 1)))
        return best

    def _seeking(self, base: Settings, limit: int) -> Seeking[Candidate]:
        return Seeking(self._fastest_of(base, limit), lambda run: run.seconds)

    def next_faster(self, best: Candidate) -> Candidate | None:
        """Of the faster candidates that were weighed, the one that needs the least more than the budget.

        All that is traced counts where the weights are placed as in ``best``, or with the next larger room.
        """
        bases = self._placements
        here = bases.index(self._placement_of(best))
        for base in bases[here : here + 2]:
            for rungs in self._rungs(base):
                rungs.traced()
        known = itertools.chain(*(rungs.known() for base in bases for rungs in self._rungs(base)))
        for needed in sorted({self._needed(option) for option in known}):
            if needed > self.request.vram:
                faster = self._fastest_known(needed)
                if faster is not None and faster.seconds < best.seconds:
                    return faster
        return None

    def smallest(self) -> Candidate | None:
        """The candidate with the least peak, whatever its time and whatever the budgets.

        None: ``largest_mib`` forbids all.
        """
        found = []
        for base in self._smallest_placements():
            found.append(self._whole(base, [self._least(rungs) for rungs in self._rungs(base)]))
        return min(filter(None, found), key=lambda run: run.peak_bytes, default=None)

    def weigh_weights(self) -> None:
        """Weigh the weights, for which the model's twin is made.

        Raises:
            LowVRAMError: the model's weights can be placed in none of the ways that the settings leave.
        """
        _ = self._placements

    def weigh_what_comes_first(self) -> None:
        """Weigh the fastest way to run each stage."""
        for rungs in self._rungs(self._smallest_placements()[0]):
            _ = rungs[0]

    def weigh_what_comes_late(self) -> None:
        """Weigh what :meth:`confirmed` comes to last, the ways to decode, and then what only :meth:`smallest` needs."""
        for rungs in self._rungs(self._smallest_placements()[0]):
            if rungs.decodes and not self._held(rungs[0], self.request.vram):
                for number in range(len(rungs)):
                    _ = rungs[number] if number != rungs.height - 1 else None  # that one only the smallest needs
        self.smallest()

    def leanest(self) -> Candidate | None:
        """Of the candidates that the device holds, the one with the least in host memory.

        More room for streamed weights leaves no less of them in host memory, and holds no more.
        """
        bases: dict[Any, Settings] = {}
        for base in self._placements:
            bases.setdefault((base.weight_storage, base.precision, base.offload), base)  # the least room comes first
        found = [self._whole(base, list(map(self._leanest, self._rungs(base)))) for base in bases.values()]
        return min(filter(None, found), key=lambda run: run.host_bytes, default=None)

    def _leanest(self, rungs: Rungs) -> Option | None:
        held = []
        for option in rungs.all():
            held += [option] if self._held(option, self.request.vram) else []
            if held and not any(stage.parked_bytes for stage in held[-1]):  # nothing waits but weights
                break
        return min(held, key=host_of, default=None)

    def pressure(self) -> float:
        """How full the fuller of the two budgets is at the least; above 1 nothing fits.

        Infinite where ``largest_mib`` forbids all. About a constant and a part that grows with the area.
        """
        least = math.inf
        for base in reversed(self._smallest_placements()):  # the narrowest weights come last
            least = min(least, max(self._least_pressure(rungs) for rungs in self._rungs(base)))
            if least <= 1:
                return least
        for base in self._placements:
            if base.offload in ("none", "component"):  # weights on the device are not in host memory
                known = [[self._pressure(option) for option in rungs.traced()] for rungs in self._rungs(base)]
                least = min(least, max(min(each, default=math.inf) for each in known))
        return least

    def _least_pressure(self, rungs: Rungs) -> float:
        last = rungs[rungs.height - 1]
        pressure = self._pressure(last)
        if pressure <= 1:
            return pressure
        start = 0 if host_of(last) > self.request.ram else rungs.height
        return min([pressure, *map(self._pressure, rungs.all(start))])

    def _pressure(self, option: Option) -> float:
        if not self._small(option):
            return math.inf
        host = max(stage.least_host_bytes for stage in option)
        return max(self._needed(option) / max(1, self.request.vram), host / max(1, self.request.ram))

    def _least(self, rungs: Rungs) -> Option | None:
        """The way to run stages that holds least on the device."""
        last = rungs[rungs.height - 1]
        if self._small(last):
            return last
        return min(filter(self._small, rungs.all()), key=self._needed, default=None)

    def _whole(self, base: Settings, chosen: Sequence[Option | None]) -> Candidate | None:
        found = [option for option in chosen if option is not None]
        return self.pricing.whole(base, itertools.chain(*found)) if len(found) == len(chosen) else None

    def _weights_alone(self, base: Settings) -> int:
        """What the weights take on the device at least, whatever the activations."""
        anatomy = self.pricing.anatomy
        away = {anatomy.autoencoder} if self.decoder_on_cpu else set()
        names = [name for name in anatomy.components if name not in away]
        weights = {name: self.pricing.costs.weights(name, base).bytes for name in names}
        sizes = [min(size, anatomy.kept.get(name, size)) for name, size in weights.items()]
        rooms = {"none": sum(sizes), "component": max(sizes, default=0), "blocks": (base.weights_mib or 0) * MIB}
        return rooms.get(base.offload or "none", 0)

    def timing(self, best: Candidate) -> Timing | None:
        """How long the modules of a step take, where weights are streamed under it."""
        steps = [stage for stage in self.pricing.costs.stages if stage.repeats]
        streamed = best.settings.offload in STREAMED
        return self.pricing.timing(steps[0], best.settings) if streamed and steps else None

    def explained(self, best: Candidate) -> tuple[StagePlan, ...]:
        """The stages of ``best``, each with the reason why it is no faster."""
        base = self._placement_of(best)
        weighed = [stage for (placed, _, _), option in self._known.items() if placed == base for stage in option]
        told = []
        for stage in best.stages:
            others = [one for one in weighed if _is_same(one, stage) and one.choice != stage.choice]
            faster = [one for one in others if one.seconds < stage.seconds]
            nearest = min(faster, key=lambda one: one.peak_bytes, default=None)
            why = why_not(nearest, self.request, self.pricing.overhead, self.largest) if nearest else ""
            told.append(dataclasses.replace(stage, why=why))
        return tuple(told)

    def _rungs(self, base: Settings) -> list[Rungs]:
        return [Rungs(self, base, group) for group in self._groups]

    @functools.cached_property
    def _groups(self) -> list[list[Stage]]:
        """The stages, those together that share knobs."""
        shared: dict[str, list[Stage]] = {}
        for stage in self.pricing.costs.stages:
            shared.setdefault(GROUPS.get(stage.name, stage.name), []).append(stage)
        return list(shared.values())

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
                self._weights_alone(base)
                found |= dict.fromkeys(self._with_rooms(base))
            except LowVRAMError as error:
                refusal = refusal or error
        if refusal is not None and not found:
            raise refusal
        return list(found)

    def _placement_of(self, run: Candidate) -> Settings:
        return self.base.filled(**{name: getattr(run.settings, name) for name in _PLACING})

    def _smallest_placements(self) -> list[Settings]:
        """Those with the fewest weights on the device: in the last of the ways to offload that can be."""
        return [base for base in self._placements if base.offload == self._placements[-1].offload]

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

    def option(self, base: Settings, group: list[Stage], choice: dict[str, Any]) -> Option:
        """What the stages of ``group`` take."""
        key = base, group[0].name, tuple(choice.items())
        if key not in self._known:
            self._known[key] = tuple(self.pricing.stage(base, stage, choice) for stage in group)
            self._traced.add((_unplaced(base), *key[1:]))
        return self._known[key]

    def is_traced(self, base: Settings, group: list[Stage], choice: dict[str, Any]) -> bool:
        """Whether the same takes no trace that was not made before, be it with weights in another place."""
        return (_unplaced(base), group[0].name, tuple(choice.items())) in self._traced

    def known(self, base: Settings, group: list[Stage], choice: dict[str, Any]) -> Option | None:
        """The same if it was asked for before."""
        return self._known.get((base, group[0].name, tuple(choice.items())))

    def _fits(self, option: Option, limit: int) -> bool:
        return self._held(option, limit) and host_of(option) <= self.request.ram and self._small(option)

    def _held(self, option: Option, limit: int) -> bool:
        return self._needed(option) <= limit

    def _needed(self, option: Option) -> int:
        return max(stage.peak_bytes for stage in option) + self.pricing.overhead

    def _small(self, option: Option) -> bool:
        return self.largest is None or largest_of(option) <= self.largest

    def too_large(self) -> BudgetError:
        """That some stage makes an allocation above ``largest_mib`` whatever is chosen."""
        least = []
        for base in self._placements:
            ways = [min(rungs.all(), key=largest_of) for rungs in self._rungs(base)]
            least.append(max(itertools.chain(*ways), key=lambda stage: stage.largest_bytes))
        return too_large(self.largest or 0, min(least, key=lambda stage: stage.largest_bytes))


_WORTH_A_TRACE = 0.995
"""Part of the best time that another candidate must promise."""

_PLACING = ("weight_storage", "precision", "offload", "weights_mib")
"""Knobs by which placements differ."""

_ROOMS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""Rooms for streamed blocks that are tried, over the last of them: shares of the denoiser's weights."""


def _seen_beyond(stage: StagePlan, seen: Sequence[tuple[StagePlan, StagePlan]]) -> float:
    """Seconds beyond what ``stage`` is composed of that whole traces told of the same with as much room for weights.

    Args:
        seen: stages as they were composed, and as they were traced.
    """
    same = (
        whole.seconds - one.seconds
        for one, whole in seen
        if _is_same(one, stage) and one.choice == stage.choice and one.weights_bytes >= stage.weights_bytes
    )
    return max(same, default=0.0)


def _unplaced(base: Settings) -> Settings:
    return dataclasses.replace(base, offload=None, weights_mib=None)


def _is_same(one: StagePlan, other: StagePlan) -> bool:
    return (one.name, one.component) == (other.name, other.component)


def fidelity_of(anatomy: Anatomy, settings: Settings) -> Fidelity:
    """The farthest from the model as loaded that any of the settings goes."""
    others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
    return max([precision_fidelity(anatomy, settings), *others])
