"""Whole runs that the search weighs against each other, and what each of their stages takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from .costs import Cost, Costs
from .hooks.precision import compute_dtype, force_upcast
from .models.anatomy import Anatomy
from .overhead import Overhead
from .plans import Request, StagePlan
from .settings import Settings
from .stages import Stage

_ASSUMED_CPU_FLOPS = 1e11
"""Operations a second of a CPU that decodes beside a GPU: an assumption, as no profile tells it."""


@dataclass(frozen=True)
class Candidate:
    """Settings with what each stage takes, and what the device needs besides tensors."""

    settings: Settings
    stages: tuple[StagePlan, ...]
    overhead_bytes: int

    @property
    def worst(self) -> StagePlan:
        """The stage with the peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.worst.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that holds it."""
        return self.peak_bytes + self.overhead_bytes

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        return max(stage.host_bytes for stage in self.stages)

    @property
    def largest_bytes(self) -> int:
        return max(stage.largest_bytes for stage in self.stages)


class Pricing:
    """What stages of one request take with given settings."""

    def __init__(self, anatomy: Anatomy, request: Request) -> None:
        self.anatomy = anatomy
        self.request = request
        self.costs = Costs(anatomy, request.shape, request.encodes, request.device)
        self.on_gpu = request.device.type != "cpu"
        self.overhead = Overhead().total() if request.device.type == "cuda" else 0

    def whole(self, base: Settings, chosen: list[StagePlan]) -> Candidate:
        """The run in which every stage goes as ``chosen``."""
        merged: dict[str, Any] = {}
        for stage in chosen:
            merged |= stage.choice
        return Candidate(base.filled(**merged), tuple(chosen), self.overhead)

    def stage(self, base: Settings, stage: Stage, choice: dict[str, Any]) -> StagePlan:
        """One stage with ``base`` and the knobs of ``choice``."""
        settings = base.filled(**choice)
        weights = self.costs.weights(settings.precision)
        away = self.on_gpu and settings.decoder_device == "cpu"
        if away and stage.component == self.anatomy.autoencoder:
            return self._on_cpu(settings, stage, choice, weights)
        streamed = settings.offload == "layer"
        cost = self.costs(stage, self.as_traced(stage, settings))
        resident = {name: size for name, size in weights.items() if not (away and name == self.anatomy.autoencoder)}
        own = 0 if streamed else weights[stage.component]
        others = sum(resident.values()) - own if settings.offload == "none" else 0
        waiting = 0 if settings.offload == "none" else sum(weights.values())
        waiting += sum(weights.values()) - sum(resident.values())
        parked = cost.host_bytes - (weights[stage.component] if streamed else 0)
        moving = (
            self.costs.largest_weight(settings.precision, stage.component) if settings.offload == "component" else 0
        )
        return StagePlan(
            name=stage.name,
            component=stage.component,
            peak_bytes=cost.peak_bytes + others,
            weights_bytes=cost.peak_bytes - cost.activation_bytes + others,
            activation_bytes=cost.activation_bytes,
            host_bytes=waiting + max(0, parked),
            held_bytes=sum(weights.values()) + max(cost.allocated_bytes, moving),
            largest_bytes=cost.largest_bytes,
            seconds=self._seconds(stage, settings, cost, weights[stage.component]),
            choice=choice,
        )

    def as_traced(self, stage: Stage, settings: Settings) -> Settings:
        """``settings`` as they act on one stage; weights that stay or move whole are added up without a trace."""
        upcast = force_upcast(self.anatomy, stage.component)
        half = compute_dtype(self.anatomy, stage.component, settings) == torch.float16
        precision = "fp32" if upcast and half else settings.precision
        return dataclasses.replace(
            settings, precision=precision, offload="layer" if settings.offload == "layer" else None, decoder_device=None
        )

    def _on_cpu(self, settings: Settings, stage: Stage, choice: dict[str, Any], weights: dict[str, int]) -> StagePlan:
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
            held_bytes=sum(weights.values()) + cost.allocated_bytes,
            largest_bytes=0,
            seconds=cost.flops / _ASSUMED_CPU_FLOPS,
            choice=choice,
        )

    def _seconds(self, stage: Stage, settings: Settings, cost: Cost, weights: int) -> float:
        """Counted work over the device's rates, with what strips do twice and all copies."""
        request = self.request
        size = compute_dtype(self.anatomy, stage.component, settings).itemsize
        seconds = (request.steps if stage.repeats else 1) * request.rates.seconds(cost, size)
        if settings.offload == "component":  # brought once a run and taken back
            seconds += 2 * weights / request.rates.copy_bandwidth
        return seconds
