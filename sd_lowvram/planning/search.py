"""The search: from a model, a picture size and a budget to the fastest settings that fit.

A run is a row of stages. For every way to place the weights, each stage begins with its fastest option, and takes the
next where that does not fit. Of all these runs, from the fastest on, the first that is within the budgets is traced
whole and answered. What an option takes is traced when its turn comes.
Peaks come from tracing the real modules with the real hooks on fake tensors (:mod:`stage_costs`), times from counted
work over the device's rates (:mod:`sd_lowvram.devices.performance`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..devices.performance import THIS
from ..devices.support import support_of
from ..devices.this_machine import RECORDED, kernel_gains
from ..errors import BudgetError, LowVRAMError, PlanningError, SettingsError
from ..hooks.attention import is_worth_choosing
from ..hooks.compiled import compilable, is_followed
from ..hooks.cuda_graphs import unrecordable
from ..hooks.packed_weights import packable
from ..hooks.registry import applicable
from ..kernels.compiler import refusal as compiling_refusal
from ..kernels.packed import refusal as packing_refusal
from ..kernels.triton import support as triton
from ..models.anatomy import Anatomy
from ..models.autoencoder import dissect
from ..models.support import check_moved
from ..settings import STREAMED, Settings, conflict
from ..streaming.timing import Timing
from ..units import MIB
from .cost_model import Pricing
from .options import Choice, Group, goes_with, groups
from .plan import Candidate, Plan, StagePlan
from .reasons import reasons, refusal, too_large, why_not
from .request import DEFAULT_STEPS, Request

__all__ = ["DEFAULT_STEPS", "Plan", "Request", "StagePlan", "make_plan"]


def make_plan(anatomy: Anatomy, request: Request, settings: Settings, approximate: bool = False) -> Plan:
    """The fastest settings that fit, traced whole.

    Args:
        settings: knobs that are fixed; the rest is searched.
        approximate: whether a narrower precision may be chosen.

    Raises:
        BudgetError: none fits; it names the smallest budget that works and the stage that needs it.
    """
    return planned(Search(anatomy, request, settings, approximate))


def planned(search: Search) -> Plan:
    """The plan that ``search`` ends with.

    Raises:
        BudgetError: as :func:`make_plan`.
    """
    request = search.request
    best = search.fastest()
    smallest = search.smallest()
    if smallest is None:
        raise search.too_large()
    if best is None:
        raise refusal(request, smallest, search.leanest() if smallest.needed_bytes <= request.vram else None)
    smallest = min(smallest, best, key=lambda run: run.needed_bytes)
    following = search.next_faster(best)
    return Plan(
        settings=best.settings,
        request=request,
        fits=True,
        predicted=best.predicted,
        stages=tuple(search.explained(best)),
        minimum_peak_bytes=smallest.peak_bytes,
        minimum_vram_bytes=smallest.needed_bytes,
        minimum_ram_bytes=smallest.least_host_bytes,
        reasons=reasons(request, best, following, search.pricing.compiling, search.pricing.unlocked_seconds(best)),
        fidelity=search.pricing.fidelity(best.settings),
        next_faster=following,
        timing=search.timing(best),
        alike={"vram": search.pricing.vram.alike, "ram": search.pricing.ram.alike},
    )


class Search:
    """Runs of one request, from the fastest to the smallest."""

    def __init__(
        self, anatomy: Anatomy, request: Request, settings: Settings, approximate: bool, like: Search | None = None
    ) -> None:
        """
        Args:
            like: of the same model and another size, which makes this one faster.
        """
        self.request = request
        check_moved(anatomy.components)
        if settings.weights_mib is not None and anatomy.denoiser is not None:
            settings = settings.filled(offload="blocks")
        settings = compilable(applicable(settings, anatomy, request.device), request.device)
        if settings.cuda_graphs and (why := unrecordable(anatomy, request.device)) is not None:
            raise SettingsError(why)
        self.pricing: Pricing = Pricing(anatomy, request, like.pricing if like else None)
        self.largest = settings.largest_mib * MIB if settings.largest_mib else math.inf
        on_gpu = self.pricing.on_gpu
        narrower = approximate and settings.precision is None
        self.precisions = (None, "fp16" if on_gpu else "bf16") if narrower else (None,)
        in_bytes = approximate and self.pricing.costs.quantised
        self.storages = (None, "int8") if in_bytes else (None,)  # nearer to full weights than fp8, and of the same size
        decoder_on_cpu = settings.decoder_device in ("cpu", "auto", None) and on_gpu
        if settings.decoder_device == "auto":
            settings = dataclasses.replace(settings, decoder_device=None)
        followed = is_followed(settings)
        open_ = settings.attention is None and not settings.deterministic and not followed
        chooses = open_ and anatomy.attentions and is_worth_choosing(anatomy, request.device)
        self._traceable_attention = "sdpa" if chooses else settings.attention
        ours = open_ and anatomy.attentions and _are_faster(request, triton.ATTENTION)
        self.base = settings.filled(
            attention="triton" if ours else self._traceable_attention,
            inference_mode=True,
            vae_slices=True if request.batch > 1 and anatomy.vae is not None else None,
            channels_last=True if on_gpu and anatomy.denoiser else None,
        )
        tiled = anatomy.vae is not None and dissect(anatomy.vae) is not None
        if not followed and _are_faster(request, *triton.FUSED) and (anatomy.residual_blocks or tiled):
            self.base = self.base.filled(fused_kernels=True)
        packs = packing_refusal(request.device) is None and bool(packable(anatomy)) and settings.packed_weights is None
        by_winograd = anatomy.vae is not None and _winograd_is_faster(request)
        self._groups = groups(self.pricing.costs.stages, self.base, tiled, decoder_on_cpu, packs, by_winograd)
        self._rejected: list[Candidate] = []

    # The fastest

    def fastest(self) -> Candidate | None:
        """The fastest run that its whole trace finds within the budgets too.

        A whole trace may find more bytes, or of more time: its figures then take the place of those that the run
        was composed of, and the next ones have their turn as long as they may be faster by what is worth a trace.
        """
        best = None
        runs = map(
            self._runs, [*self._placements, *self._compiled, *self._recorded]
        )  # in digits that sums of the same times in another order share
        for run in heapq.merge(*runs, key=lambda run: float(f"{run.seconds:.9g}")):
            if best is not None and run.seconds >= _WORTH_A_TRACE * best.seconds:
                break
            if not self._fits(run):
                self._rejected.append(run)
                continue
            whole = self.pricing.confirmed(run)
            if self._fits(whole) and (best is None or whole.seconds < best.seconds):
                best = whole
        return best

    def _runs(self, base: Settings) -> Iterator[Candidate]:
        """Runs with the weights placed as ``base`` says, each faster than the next, up to the first that fits.

        Where the weights alone do not fit, there is only one.
        """
        left = [self._from_the_fastest(base, group) for group in self._groups]
        chosen = [choice for choices in left if (choice := next(choices, None)) is not None]
        while len(chosen) == len(left):
            yield (run := self.pricing.whole(base, self._options(base, chosen)))
            fits = list(map(self._fits, self._options(base, chosen)))  # as traced whole, if it was the run's turn
            if all(fits) or not self.pricing.vram.holds(run.weights_bytes + run.overhead_bytes):
                return
            try:
                ways = zip(chosen, fits, left, strict=True)
                chosen = [choice if fit else next(choices) for choice, fit, choices in ways]
            except StopIteration:
                return

    def _from_the_fastest(self, base: Settings, group: Group) -> Iterator[Choice]:
        """The ways to run ``group``; those of one tier are priced together, when their turn comes."""
        for tier in group.tiers:
            possible = [choice for choice in tier if goes_with(choice, base)]
            yield from sorted(possible, key=lambda choice: self._option(base, group, choice).seconds)

    def next_faster(self, best: Candidate) -> Candidate | None:
        """Of the faster runs that the device cannot hold, the one that needs the least more than the budget."""
        beyond = [run for run in self._rejected if run.needed_bytes > self.request.vram and run.seconds < best.seconds]
        faster = [run for run in beyond if run.host_bytes <= self.request.ram and self._small(run)]
        return min(faster, key=lambda run: (run.needed_bytes, run.seconds), default=None)

    # The smallest

    def smallest(self) -> Candidate | None:
        """The run with the least peak, whatever its time and whatever the budgets.

        None: ``largest_mib`` forbids all.
        """
        fewest = [base for base in self._placements if base.offload == self._placements[-1].offload]
        run = self._least(fewest, "needed_bytes", self._small, lambda group: [group.smallest])
        return run if run is not None else self._least(fewest, "needed_bytes", self._small)

    def leanest(self) -> Candidate | None:
        """Of the runs that the device holds, the one with the least in host memory.

        More room for streamed weights leaves no less of them in host memory, and holds no more.
        """
        ways = operator.attrgetter("weight_storage", "precision", "offload", "split_layers")
        least_rooms = {ways(one): one for one in reversed(self._placements)}
        return self._least(least_rooms.values(), "host_bytes", self._held)

    def too_large(self) -> BudgetError:
        """That some stage makes an allocation above ``largest_mib`` whatever is chosen."""
        run = self._least(self._placements, "largest_bytes", lambda _: True)
        assert run is not None
        return too_large(int(self.largest), max(run.stages, key=lambda stage: stage.largest_bytes))

    def _least(
        self,
        bases: Iterable[Settings],
        name: str,
        allowed: Callable[[Candidate], bool],
        ways: Callable[[Group], list[Choice]] = lambda group: group.choices,
    ) -> Candidate | None:
        """Of the runs that place weights as one of ``bases`` and go ``ways`` that are allowed, the one with the least
        of the attribute ``name``."""
        size, runs = operator.attrgetter(name), []
        for base in bases:
            options = (
                [self._option(base, group, choice) for choice in ways(group) if goes_with(choice, base)]
                for group in self._groups
            )
            found = [list(filter(allowed, each)) for each in options]
            runs += [self.pricing.whole(base, [min(each, key=size) for each in found])] if all(found) else []
        return min(runs, key=size, default=None)

    # What there is

    @functools.cached_property
    def _placements(self) -> list[Settings]:
        """The ways to place the weights. One that this model's weights do not allow is no candidate, and ends the
        search only where there is no other."""
        ways = itertools.product(self.storages, self.precisions, self._offloads())  # weights are converted seldom
        found: dict[Settings, None] = {}
        refused: LowVRAMError | None = None
        for storage, precision, offload in ways:
            base = self.base.filled(weight_storage=storage, precision=precision, offload=offload)
            if conflict(base) is not None:
                continue
            for split in self._splits(base):
                try:
                    for name in self.pricing.anatomy.components:
                        self.pricing.costs.weights(name, split)
                    found |= dict.fromkeys(self._with_rooms(split))
                except PlanningError:
                    raise
                except LowVRAMError as error:
                    refused = refused or error
        if refused is not None and not found:
            raise refused
        return list(found)

    @functools.cached_property
    def _compiled(self) -> list[Settings]:
        """Those of the placements with which the blocks can be compiled, where that is known to be faster."""
        known = self.pricing.compiling
        if known is None or known.gain <= 1 or self.base.compile is not None or self.pricing.anatomy.denoiser is None:
            return []
        if self.base.channels_last is False or compiling_refusal(self.request.device) is not None:
            return []
        compiled: dict[str, Any] = {"compile": "regional", "channels_last": True, "fused_kernels": None}
        compiled |= {"attention": self._traceable_attention}
        return [base for one in self._placements if conflict(base := dataclasses.replace(one, **compiled)) is None]

    @functools.cached_property
    def _recorded(self) -> list[Settings]:
        """Those of the placements with which the denoiser's passes can be recorded, where that was measured to be
        faster on the card; hosts' own code acts between its layers, which a recorded pass would not call."""
        anatomy = self.pricing.anatomy
        if self.base.cuda_graphs is not None or anatomy.unet is None or anatomy.family != "diffusers" or anatomy.kept:
            return []
        if is_followed(self.base) or unrecordable(anatomy, self.request.device) is not None:
            return []
        if not _are_faster(self.request, RECORDED):
            return []
        found = [dataclasses.replace(one, cuda_graphs=True) for one in self._placements]
        return [one for one in found if conflict(one) is None]

    def _offloads(self) -> tuple[str, ...]:
        """Those that the device and the other knobs bear."""
        ways: tuple[str, ...] = ("none", "component")
        if support_of(self.request.device).streams:
            ways += STREAMED if self.pricing.anatomy.denoiser is not None else ("layer",)
        return tuple(way for way in ways if conflict(self.base.filled(offload=way)) is None)

    @staticmethod
    def _splits(base: Settings) -> list[Settings]:
        """``base`` with single layers whole, and split: split ones need less room, which a faster way to run a step
        may have."""
        if base.offload != "layer" or base.split_layers is not None:
            return [base]
        return [base, dataclasses.replace(base, split_layers=True)]

    def _with_rooms(self, base: Settings) -> list[Settings]:
        """``base`` with every room for streamed weights that is tried; the same whatever the budget."""
        denoiser = self.pricing.anatomy.denoiser
        if base.offload != "blocks" or base.weights_mib is not None or denoiser is None:
            return [base]
        weights = self.pricing.costs.weights(denoiser, base)
        rooms = {-(-weights.bytes * share // (_ROOMS[-1] * MIB)) for share in _ROOMS[:-1]}
        least = -(-weights.room_bytes // MIB)
        return [dataclasses.replace(base, weights_mib=room) for room in sorted({least, *rooms}) if room >= least]

    def _option(self, base: Settings, group: Group, choice: Choice) -> Candidate:
        settings = base.filled(**choice)
        priced = tuple(self.pricing.stage(settings, stage, choice, base) for stage in group.stages)
        return Candidate(settings, priced, self.request.overhead_bytes, base)

    def _options(self, base: Settings, chosen: Iterable[Choice]) -> list[Candidate]:
        return [self._option(base, *each) for each in zip(self._groups, chosen, strict=True)]

    def _fits(self, run: Candidate) -> bool:
        return self._held(run) and self.pricing.ram.holds(run.host_bytes)

    def _held(self, run: Candidate) -> bool:
        """Whether the device can hold it."""
        return self.pricing.vram.holds(run.needed_bytes) and self._small(run)

    def _small(self, run: Candidate) -> bool:
        return run.largest_bytes <= self.largest

    # What the plan says of it

    def explained(self, best: Candidate) -> Iterator[StagePlan]:
        """The stages of ``best``, each with the reason why it is no faster."""
        priced = self.pricing.priced(best.base)
        for stage in best.stages:
            others = [one for one in priced if (one.name, one.component) == (stage.name, stage.component)]
            yield dataclasses.replace(stage, why=why_not(stage, others, self.request, self.largest))

    def timing(self, best: Candidate) -> Timing | None:
        """How long the modules of a step take, where weights are streamed under it."""
        steps = [stage for stage in self.pricing.costs.stages if stage.repeats]
        streamed = best.settings.offload in STREAMED
        return self.pricing.timing(steps[0], best.settings) if streamed and steps else None


def _are_faster(request: Request, *kernels: str) -> bool:
    """Whether each of these was measured to be faster on the card at hand, for which the plan is, at every shape."""
    if request.device.type != "cuda" or request.rates.name != THIS:
        return False
    if kernels != (RECORDED,) and triton.refusal(request.device):
        return False
    gains = [gain for name, gain in kernel_gains(request.device).items() if name.startswith(kernels)]
    return bool(gains) and min(gains) > 1


def _winograd_is_faster(request: Request) -> bool:
    """Whether Winograd's convolutions were measured to be faster on the processor at hand, for which the plan is."""
    if request.device.type != "cpu" or request.rates.name != THIS:
        return False
    gains = kernel_gains(request.device)
    return bool(gains) and min(gains.values()) > 1


_WORTH_A_TRACE = 0.995
"""Part of the best time that another run must promise."""

_ROOMS = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""Rooms for streamed blocks that are tried, over the last of them: shares of the denoiser's weights."""
