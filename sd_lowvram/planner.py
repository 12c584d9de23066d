"""The search: from a model, a picture size and a budget to the fastest settings that fit.

A run is a row of stages. For every precision that is allowed and every way to place the weights, each stage takes the
fastest of its options whose peak, with what else is resident then, stays within the budget; the fastest whole wins.
Peaks come from tracing the real modules with the real hooks on fake tensors (:mod:`costs`), times from counted work
over the device's rates (:mod:`rates`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .costs import Cost, Costs
from .errors import BadInputError, BudgetError
from .hooks.precision import compute_dtype, force_upcast, precision_fidelity
from .models.anatomy import Anatomy
from .overhead import Overhead
from .rates import Rates
from .settings import Fidelity, Settings
from .sizes import format_size
from .stages import Shape, Stage, latent_size

DEFAULT_STEPS = 30

_ASSUMED_CPU_FLOPS = 1e11
"""Operations a second of a CPU that decodes beside a GPU: an assumption, as no profile tells it."""


@dataclass(frozen=True)
class Request:
    """What is asked for: pixels, pictures, bytes of device and host memory, the device and its rates."""

    width: int
    height: int
    batch: int
    vram: int
    ram: int
    device: torch.device
    rates: Rates
    steps: int = DEFAULT_STEPS
    guidance: bool = True
    encodes: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(self.width, self.height, self.batch, self.guidance)


@dataclass(frozen=True)
class Predicted:
    """Bytes at the peak, and the seconds of the whole run.

    Attributes:
        peak_bytes: on the device, weights included.
        overhead_bytes: of the driver and the libraries, besides.
        weights_bytes, activation_bytes: on the device in the stage that has the peak.
        host_bytes: weights and maps that wait in host memory.
        largest_bytes: the largest single allocation.
        seconds: text, all steps, decoding, and moving the weights.
        stage: the one with the peak.
    """

    peak_bytes: int
    overhead_bytes: int
    weights_bytes: int
    activation_bytes: int
    host_bytes: int
    largest_bytes: int
    seconds: float
    stage: str


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan: what it needs and how long it takes (a denoising step: all steps together)."""

    name: str
    component: str
    peak_bytes: int
    weights_bytes: int
    activation_bytes: int
    host_bytes: int
    largest_bytes: int
    seconds: float
    choice: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Settings with what they are predicted to need, and why they were chosen.

    Attributes:
        settings: every knob as it is attached.
        fits: the peak and the overhead together stay within the budget, and the host's share within its own.
        predicted: the run as a whole; ``stages`` each part of it.
        minimum_peak_bytes: the least peak that any allowed settings reach; ``minimum_vram_bytes`` adds the overhead.
        minimum_ram_bytes: host memory that those smallest settings need.
        fidelity: the farthest from the baseline that any chosen setting goes.
        reasons: sentences for people.
    """

    settings: Settings
    request: Request
    fits: bool
    predicted: Predicted
    stages: tuple[StagePlan, ...]
    minimum_peak_bytes: int
    minimum_vram_bytes: int
    minimum_ram_bytes: int
    fidelity: Fidelity
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are those of the command line's ``plan --json``."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        request = {**dataclasses.asdict(self.request), "device": str(self.request.device)}
        return plain | {
            "settings": self.settings.as_dict(),
            "request": request | {"rates": self.request.rates.name},
            "predicted": dataclasses.asdict(self.predicted),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "fidelity": str(self.fidelity),
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True)
class _Run:
    """One whole candidate."""

    settings: Settings
    stages: tuple[StagePlan, ...]
    overhead_bytes: int

    @property
    def worst(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        return max(stage.host_bytes for stage in self.stages)


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
        raise _refusal(request, smallest)
    smallest = min(smallest, best, key=lambda run: run.worst.peak_bytes)
    worst = best.worst
    predicted = Predicted(
        peak_bytes=worst.peak_bytes,
        overhead_bytes=best.overhead_bytes,
        weights_bytes=worst.weights_bytes,
        activation_bytes=worst.activation_bytes,
        host_bytes=best.host_bytes,
        largest_bytes=max(stage.largest_bytes for stage in best.stages),
        seconds=best.seconds,
        stage=worst.name,
    )
    return Plan(
        settings=best.settings,
        request=request,
        fits=True,
        predicted=predicted,
        stages=best.stages,
        minimum_peak_bytes=smallest.worst.peak_bytes,
        minimum_vram_bytes=smallest.worst.peak_bytes + smallest.overhead_bytes,
        minimum_ram_bytes=smallest.host_bytes,
        fidelity=fidelity_of(anatomy, best.settings),
        reasons=_reasons(request, best, search),
    )


class _Search:
    """Candidates of one request, from the fastest to the smallest."""

    def __init__(self, anatomy: Anatomy, request: Request, settings: Settings, approximate: bool) -> None:
        self.anatomy = anatomy
        self.request = request
        self.costs = Costs(anatomy, request.shape, request.encodes, request.device)
        self.on_gpu = request.device.type != "cpu"
        self.precisions = self._precisions(approximate and settings.precision is None)
        self.decoder_on_cpu = settings.decoder_device in ("cpu", "auto", None) and self.on_gpu
        if settings.decoder_device == "auto":
            settings = dataclasses.replace(settings, decoder_device=None)
        sees = anatomy.attentions and settings.attention is None and not settings.deterministic
        self.base = settings.filled(
            attention="sdpa" if sees else None,
            inference_mode=True,
            vae_slices=True if request.batch > 1 and anatomy.vae is not None else None,
            channels_last=True if self.on_gpu and anatomy.denoiser else None,
        )

    def fastest(self) -> _Run | None:
        fitting = [run for run in map(self._best, self._placements()) if run is not None]
        return min(fitting, key=lambda run: run.seconds, default=None)

    def smallest(self) -> _Run:
        """The candidate with the least peak, whatever its time and whatever the budgets."""
        placed = [base for base in self._placements() if base.offload == "layer" or self.base.offload is not None]
        runs = [self._run(base, [self._smallest(base, stage) for stage in self.costs.stages]) for base in placed]
        return min(runs, key=lambda run: run.worst.peak_bytes)

    def _precisions(self, may_narrow: bool) -> list[str | None]:
        if not may_narrow:
            return [None]
        return [None, "fp16" if self.on_gpu else "bf16"]

    def _placements(self) -> Iterator[Settings]:
        seen = set()
        for offload in ("none", "component", "layer"):
            for precision in self.precisions:
                candidate = self.base.filled(offload=offload, precision=precision)
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate

    def _best(self, base: Settings) -> _Run | None:
        weights = self.costs.weights(base.precision).values()
        alone = {"none": sum(weights), "component": max(weights), "layer": 0}[base.offload or "none"]
        if alone + self._overhead() > self.request.vram:
            return None
        chosen = []
        for stage in self.costs.stages:
            option = next((plan for plan in self._options(base, stage) if self._fits(plan)), None)
            if option is None:
                return None
            chosen.append(option)
        return self._run(base, chosen)

    def _run(self, base: Settings, chosen: list[StagePlan]) -> _Run:
        merged: dict[str, Any] = {}
        for stage in chosen:
            merged |= stage.choice
        return _Run(base.filled(**merged), tuple(chosen), self._overhead())

    def _fits(self, plan: StagePlan) -> bool:
        request = self.request
        return plan.peak_bytes + self._overhead() <= request.vram and plan.host_bytes <= request.ram

    def _overhead(self) -> int:
        return Overhead().total() if self.request.device.type == "cuda" else 0

    def _options(self, base: Settings, stage: Stage, only_last: bool = False) -> Iterator[StagePlan]:
        """Ways to run a stage, from the fastest to the smallest."""
        choices = _choices(stage, self.decoder_on_cpu and not only_last)
        for choice in choices[-1:] if only_last else choices:
            taken = {name: value for name, value in choice.items() if getattr(base, name) is None}
            yield self._stage(base, stage, taken)

    def _smallest(self, base: Settings, stage: Stage) -> StagePlan:
        *_, last = self._options(base, stage, only_last=True)
        return last

    def _stage(self, base: Settings, stage: Stage, choice: dict[str, Any]) -> StagePlan:
        settings = base.filled(**choice)
        weights = self.costs.weights(settings.precision)
        away = self.on_gpu and settings.decoder_device == "cpu"
        if away and stage.component == self.anatomy.autoencoder:
            return self._stage_on_cpu(settings, stage, choice, weights)
        streamed = settings.offload == "layer"
        cost = self.costs(stage, self._as_traced(stage, settings, streamed))
        resident = {name: size for name, size in weights.items() if not (away and name == self.anatomy.autoencoder)}
        own = 0 if streamed else weights[stage.component]
        others = sum(resident.values()) - own if settings.offload == "none" else 0
        waiting = 0 if settings.offload == "none" else sum(weights.values())
        waiting += sum(weights.values()) - sum(resident.values())
        parked = cost.host_bytes - (weights[stage.component] if streamed else 0)
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=cost.peak_bytes + others,
            weights_bytes=cost.peak_bytes - cost.activation_bytes + others,
            activation_bytes=cost.activation_bytes,
            host_bytes=waiting + max(0, parked),
            largest_bytes=cost.largest_bytes,
            seconds=self._seconds(stage, settings, cost, weights[stage.component]),
            choice=choice,
        )

    def _as_traced(self, stage: Stage, settings: Settings, streamed: bool) -> Settings:
        """``settings`` as they act on one stage; weights that stay or move whole are added up without a trace."""
        upcast = force_upcast(self.anatomy, stage.component)
        half = compute_dtype(self.anatomy, stage.component, settings) == torch.float16
        precision = "fp32" if upcast and half else settings.precision
        return dataclasses.replace(
            settings, precision=precision, offload="layer" if streamed else None, decoder_device=None
        )

    def _stage_on_cpu(
        self, settings: Settings, stage: Stage, choice: dict[str, Any], weights: dict[str, int]
    ) -> StagePlan:
        """The decoder in host memory, in fp32."""
        cost = self.costs(stage, dataclasses.replace(settings, precision="fp32", offload=None, decoder_device=None))
        others = sum(weights.values()) - weights[stage.component] if settings.offload == "none" else 0
        waiting = 0 if settings.offload == "none" else sum(weights.values()) - weights[stage.component]
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=others,
            weights_bytes=others,
            activation_bytes=0,
            host_bytes=waiting + cost.peak_bytes + cost.host_bytes,
            largest_bytes=0,
            seconds=cost.flops / _ASSUMED_CPU_FLOPS,
            choice=choice,
        )

    def _seconds(self, stage: Stage, settings: Settings, cost: Cost, weights: int) -> float:
        """Counted work of the plain stage over the device's rates, with what strips do twice and all copies."""
        request = self.request
        size = compute_dtype(self.anatomy, stage.component, settings).itemsize
        work = cost
        if stage.name == "denoise":  # a trace of chunks runs one of many equal ones: the plain stage has the count
            without = dict.fromkeys(DENOISE_LADDER[-1])
            plain = self.costs(stage, dataclasses.replace(self._as_traced(stage, settings, False), **without))
            rows = latent_size(self.anatomy, request.shape)[0]
            halo = 2 * ((settings.residual_strips or 1) - 1) / max(rows, 1)
            work = dataclasses.replace(plain, flops=int(plain.flops * (1 + _CONVOLUTIONS * min(halo, 1.0))))
            work = dataclasses.replace(work, copied_bytes=cost.copied_bytes, operators=cost.operators)
        seconds = (request.steps if stage.repeats else 1) * request.rates.seconds(work, size)
        if settings.offload == "component":  # brought once a run and taken back
            seconds += 2 * weights / request.rates.copy_bandwidth
        return seconds


def _choices(stage: Stage, decoder_on_cpu: bool) -> list[dict[str, Any]]:
    """The ladder of a stage: each rung slower than the one before, and smaller."""
    if stage.name == "denoise":
        return DENOISE_LADDER
    if stage.name in ("decode", "encode"):
        on_cpu = [{"vae_tiles": "off", "decoder_device": "cpu"}] if decoder_on_cpu else []
        return [*DECODE_LADDER, *on_cpu]
    return [{}]


_CONVOLUTIONS = 0.5
"""About what residual blocks have of a UNet's operations; only these are done again in the halo of strips."""

DENOISE_LADDER: list[dict[str, Any]] = [
    {},
    {"feed_forward_chunks": 4},
    {"feed_forward_chunks": 8, "residual_strips": 8, "transformer_chunks": 8},
    {"feed_forward_chunks": 8, "residual_strips": 8, "transformer_chunks": 8, "park_skips": True},
    {
        "feed_forward_chunks": 16,
        "residual_strips": 16,
        "transformer_chunks": 16,
        "park_skips": True,
        "guidance_in_turn": True,
    },
]
DECODE_LADDER: list[dict[str, Any]] = [
    {"vae_tiles": "off"},
    {"vae_tiles": "exact", "vae_map": "held"},
    {"vae_tiles": "exact", "vae_map": "parked"},
    {"vae_tiles": "exact", "vae_map": "recomputed"},
    {"vae_tiles": "exact", "vae_map": "parked", "vae_strip_mib": 4},
]


def check_size(width: int, height: int, batch: int = 1, factor: int = 8) -> None:
    """Raise BadInputError unless the picture's sides are positive multiples of ``factor``; says what is nearest."""
    for name, pixels in (("width", width), ("height", height)):
        if isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < factor or pixels % factor:
            near = f": the nearest is {max(factor, factor * round(pixels / factor))}" if isinstance(pixels, int) else ""
            raise BadInputError(f"{name} {pixels!r} must be a positive multiple of {factor}{near}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise BadInputError(f"batch {batch!r} must be a whole number of at least 1")


def _refusal(request: Request, smallest: _Run) -> BudgetError:
    worst = smallest.worst
    needed = worst.peak_bytes + smallest.overhead_bytes
    size = f"{request.width}x{request.height}" + (f", batch {request.batch}" if request.batch > 1 else "")
    if needed > request.vram:
        overhead = f" ({format_size(smallest.overhead_bytes)} of it for the driver)" if smallest.overhead_bytes else ""
        return BudgetError(
            f"{format_size(request.vram)} cannot hold {size}: {worst.name} needs at least "
            f"{format_size(needed)}{overhead}. Give that much, or a smaller picture",
            needed_bytes=needed,
            stage=worst.name,
        )
    return BudgetError(
        f"{format_size(request.ram)} of host memory cannot hold what waits there for {size} with "
        f"{format_size(request.vram)} on the device: at least {format_size(smallest.host_bytes)} is needed",
        needed_bytes=smallest.host_bytes,
        stage="host",
    )


def fidelity_of(anatomy: Anatomy, settings: Settings) -> Fidelity:
    """The farthest from the model as loaded that any of the settings goes."""
    others = [knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value]
    return max([precision_fidelity(anatomy, settings), *others])


def _reasons(request: Request, best: _Run, search: _Search) -> tuple[str, ...]:
    worst, chosen = best.worst, best.settings
    total = worst.peak_bytes + best.overhead_bytes
    reasons = [f"peak {format_size(total)} of {format_size(request.vram)}, reached in {worst.name}"]
    if chosen.offload == "component":
        reasons.append("one component's weights on the device at a time")
    if chosen.offload == "layer":
        reasons.append("one layer's weights on the device at a time: much slower, and the least memory")
    if chosen.vae_tiles == "exact":
        reasons.append(f"decoding by exact strips, the feature map {chosen.vae_map}")
    if chosen.decoder_device == "cpu":
        reasons.append("decoding on the CPU: the device cannot hold the decoder")
    return tuple(reasons)
