"""Weights, operations, time and memory of each unit of a UNet; the analysis with which A-SDM (2023) begins."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .. import progress
from ..compat.private import tree_map_only
from ..devices.performance import Rates, profile
from ..models import anatomy_of_components
from ..models.calls import Shape, denoise_step
from ..models.calls_diffusers import predict, step_inputs
from ..tracing import MemoryTrace, trace
from ..weights import weight_bytes
from .layers import UNetLayer, own_side, units_of

_ROUNDS = 3
OTHERS = "others"


@dataclass(frozen=True)
class Taken:
    """Costs of a unit of a UNet in a denoising step.

    Attributes:
        name: name of the unit, as in :mod:`layers`; "others": everything that belongs to no unit.
        parameters, bytes: number and bytes of its weights.
        operations: floating-point operations; a multiply-add counts two.
        seconds: measured here, or predicted by a device's rates.
        peak_bytes: peak of the whole UNet's activations while the unit runs, without weights.
    """

    name: str
    parameters: int
    bytes: int
    operations: int
    seconds: float
    peak_bytes: int


def analyse_unet(unet: Any, width: int, height: int, passes: int = 2, rates: Rates | None = None) -> list[Taken]:
    """Costs of each unit of ``unet`` in a step for a picture of ``width`` x ``height`` pixels, in the order of the run.

    Args:
        unet: a UNet2DConditionModel; with ``rates`` it may be on the meta device.
        passes: rows of the batch: 2 with guidance.
        rates: rates of the device whose times are predicted. None: times are measured on the device of ``unet``.

    Raises:
        BadInputError: ``unet`` is of an unknown kind.
    """
    units = [*units_of(unet), UNetLayer(OTHERS, "", unet)]
    anatomy = anatomy_of_components("diffusers", {"unet": unet})
    shape = Shape(width, height, passes=passes)
    with _device_context(unet):
        inputs = step_inputs(anatomy, shape)
    step = functools.partial(denoise_step, predict=predict)
    traced = trace(step, unet, inputs)
    if rates is not None:
        seconds = _predict(units, traced, rates, next(unet.parameters()).dtype.itemsize)
    else:
        real = tree_map_only(Tensor, _random_values, inputs)
        seconds = _measure(units, lambda: step(unet, real))
    operations, peaks = _operations(units, traced), _peaks(units, traced)
    weights = {unit.name: [_parameters(unit.module), weight_bytes(unit.module)] for unit in units}
    columns = zip(*weights.values(), strict=True)
    weights[OTHERS] = [2 * whole - sum(column) for whole, column in zip(weights[OTHERS], columns, strict=True)]
    return [
        Taken(name, parameters, size, operations[name], seconds[name], peaks[name])
        for name, (parameters, size) in weights.items()
    ]


def count_costs(unet: Any, side: int | None = None) -> dict[str, int]:
    """Count the costs of a guided step, without times.

    Args:
        unet: may be on the meta device.
        side: side of the picture in pixels; None: the UNet's own size.

    Returns:
        "parameters", "bytes", "operations" and "peak_bytes".
    """
    side = side or own_side(unet)
    return totals(analyse_unet(unet, side, side, rates=profile("rtx2070")))


def totals(taken: Sequence[Taken]) -> dict[str, int]:
    """Totals of all units: sums, and the largest peak."""
    sums = {name: sum(getattr(unit, name) for unit in taken) for name in ("parameters", "bytes", "operations")}
    return {**sums, "peak_bytes": max(unit.peak_bytes for unit in taken)}


def sum_blocks(taken: list[Taken]) -> list[Taken]:
    """Units summed up to blocks; of peaks the highest."""
    blocks: dict[str, list[Taken]] = {}
    for unit in taken:
        blocks.setdefault(unit.name.split(".")[0], []).append(unit)
    return [_sum(name, units) for name, units in blocks.items()]


def _sum(name: str, units: list[Taken]) -> Taken:
    return Taken(
        name,
        sum(unit.parameters for unit in units),
        sum(unit.bytes for unit in units),
        sum(unit.operations for unit in units),
        sum(unit.seconds for unit in units),
        max(unit.peak_bytes for unit in units),
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextlib.contextmanager
def _device_context(unet: nn.Module) -> Iterator[None]:
    with torch.device(next(unet.parameters()).device):
        yield


def _random_values(empty: Tensor) -> Tensor:
    """Values for what a step starts from: noise, and a timestep in the middle."""
    if not empty.is_floating_point():
        return torch.full_like(empty, 500)
    how: dict[str, Any] = {"dtype": empty.dtype, "device": empty.device}
    return torch.randn(empty.shape, generator=torch.Generator(empty.device), **how)


def _owner(units: list[UNetLayer], path: str) -> str:
    """The name of the unit that the module at ``path`` belongs to."""
    inside = (unit.name for unit in units if unit.path and (path == unit.path or path.startswith(unit.path + ".")))
    return next(inside, OTHERS)


def _predict(units: list[UNetLayer], traced: MemoryTrace, rates: Rates, element_size: int) -> dict[str, float]:
    by_unit = dict.fromkeys((unit.name for unit in units), 0.0)
    for span, seconds in zip(traced.spans, rates.shares(traced.spans, element_size), strict=True):
        by_unit[_owner(units, span.path)] += seconds
    return by_unit


def _operations(units: list[UNetLayer], traced: MemoryTrace) -> dict[str, int]:
    operations = dict.fromkeys((unit.name for unit in units), 0)
    for span in traced.spans:
        operations[_owner(units, span.path)] += span.flops
    return operations


def _peaks(units: list[UNetLayer], traced: MemoryTrace) -> dict[str, int]:
    peaks = dict.fromkeys((unit.name for unit in units), 0)
    for event in traced.timeline:
        if event.operator:  # not the booking of what was there before
            name = _owner(units, event.path)
            peaks[name] = max(peaks[name], event.device_bytes - traced.weights_bytes)
    return peaks


def _measure(units: list[UNetLayer], run: Any) -> dict[str, float]:
    """Seconds of each unit, medians of some steps after one that warms up; of the rest what a step takes besides."""
    device = next(units[0].module.parameters()).device
    rounds: list[Mapping[str, float]] = []
    for number in progress.report_each("steps", range(_ROUNDS + 1)):
        taken: dict[str, float] = {}
        with _time_units(units, taken, device), torch.inference_mode():
            run()
        if number:
            rounds.append({**taken, OTHERS: taken[OTHERS] - sum(taken.values()) + taken[OTHERS]})
    return {unit.name: median(taken[unit.name] for taken in rounds) for unit in units}


@contextlib.contextmanager
def _time_units(units: list[UNetLayer], taken: dict[str, float], device: torch.device) -> Iterator[None]:
    """Fill ``taken`` with the seconds of each unit's calls within the block; the whole UNet is a unit too."""
    started: dict[str, float] = {}

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def begin(name: str) -> Any:
        return lambda *_: started.__setitem__(name, now())

    def end(name: str) -> Any:
        return lambda *_: taken.__setitem__(name, taken.get(name, 0.0) + now() - started[name])

    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.callback(unit.module.register_forward_pre_hook(begin(unit.name)).remove)
            stack.callback(unit.module.register_forward_hook(end(unit.name)).remove)
        yield
