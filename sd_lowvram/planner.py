"""The search: from a model, a picture size and a budget to the fastest settings that fit.

A run is a row of stages. For every precision that is allowed and every way to place the weights, each stage takes the
fastest of its options whose peak, with what else is resident then, stays within the budget; the fastest whole wins.
Peaks come from tracing the real modules with the real hooks on fake tensors (:mod:`costs`), times from counted work
over the device's rates (:mod:`rates`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .candidates import Candidate, Pricing
from .hooks.precision import precision_fidelity
from .ladders import choices
from .models.anatomy import Anatomy
from .plans import DEFAULT_STEPS, Plan, Predicted, Request, StagePlan, check_size
from .reasons import reasons, refusal
from .settings import Fidelity, Settings
from .stages import Stage

__all__ = ["DEFAULT_STEPS", "Plan", "Request", "StagePlan", "check_size", "fidelity_of", "make_plan"]


def make_plan(anatomy: Anatomy, request: Request, settings: Settings, approximate: bool = False) -> Plan:
    """The fastest settings that fit.

    Args:
        settings: knobs that are fixed; the rest is searched.
        approximate: whether a narrower precision may be chosen.

    Raises:
        BudgetError: none fits; it tells the smallest budget that works and the stage that needs it.
    """
    search = _Search(anatomy, request, settings, approximate)
    best = search.fastest()
    smallest = search.smallest()
    if best is None:
        raise refusal(request, smallest)
    smallest = min(smallest, best, key=lambda run: run.peak_bytes)
    worst = best.worst
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
        stages=best.stages,
        minimum_peak_bytes=smallest.peak_bytes,
        minimum_vram_bytes=smallest.needed_bytes,
        minimum_ram_bytes=smallest.host_bytes,
        fidelity=fidelity_of(anatomy, best.settings),
        reasons=reasons(request, best),
    )


class _Search:
    """Candidates of one request, from the fastest to the smallest."""

    def __init__(self, anatomy: Anatomy, request: Request, settings: Settings, approximate: bool) -> None:
        self.request = request
        self.pricing = Pricing(anatomy, request)
        on_gpu = self.pricing.on_gpu
        self.precisions: list[str | None] = [None]
        if approximate and settings.precision is None:
            self.precisions.append("fp16" if on_gpu else "bf16")
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

    def fastest(self) -> Candidate | None:
        fitting = [run for run in map(self._best, self._placements()) if run is not None]
        return min(fitting, key=lambda run: run.seconds, default=None)

    def smallest(self) -> Candidate:
        """The candidate with the least peak, whatever its time and whatever the budgets."""
        placed = [base for base in self._placements() if base.offload == "layer" or self.base.offload is not None]
        stages = self.pricing.costs.stages
        runs = [self.pricing.whole(base, [self._smallest(base, stage) for stage in stages]) for base in placed]
        return min(runs, key=lambda run: run.peak_bytes)

    def _placements(self) -> Iterator[Settings]:
        seen = set()
        for offload in ("none", "component", "layer"):
            for precision in self.precisions:
                candidate = self.base.filled(offload=offload, precision=precision)
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate

    def _best(self, base: Settings) -> Candidate | None:
        weights = self.pricing.costs.weights(base.precision).values()
        alone = {"none": sum(weights), "component": max(weights)}.get(base.offload or "none", 0)
        if alone + self.pricing.overhead > self.request.vram:
            return None
        chosen = []
        for stage in self.pricing.costs.stages:
            option = next((plan for plan in self._options(base, stage) if self._fits(plan)), None)
            if option is None:
                return None
            chosen.append(option)
        return self.pricing.whole(base, chosen)

    def _fits(self, plan: StagePlan) -> bool:
        request = self.request
        return plan.peak_bytes + self.pricing.overhead <= request.vram and plan.host_bytes <= request.ram

    def _options(self, base: Settings, stage: Stage, only_last: bool = False) -> Iterator[StagePlan]:
        """Ways to run a stage, from the fastest to the smallest."""
        rungs = choices(stage.name, self.decoder_on_cpu and not only_last)
        for choice in rungs[-1:] if only_last else rungs:
            taken = {name: value for name, value in choice.items() if getattr(base, name) is None}
            yield self.pricing.stage(base, stage, taken)

    def _smallest(self, base: Settings, stage: Stage) -> StagePlan:
        *_, last = self._options(base, stage, only_last=True)
        return last


def fidelity_of(anatomy: Anatomy, settings: Settings) -> Fidelity:
    """The farthest from the model as loaded that any of the settings goes."""
    others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
    return max([precision_fidelity(anatomy, settings), *others])
