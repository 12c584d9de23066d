"""Simulated slowdown of a step with only a part of the weights on the device.

Bytes and work of every layer come from a trace of the full-size UNet, times of compute and copies from the profile of a
device: nothing is measured here. Our search is compared with three simple policies with equal units and bytes, and with
the lower bound of all schedules.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sd_lowvram import progress
from sd_lowvram.checkpoints.architectures import NAMES, build_components
from sd_lowvram.devices.performance import Rates, profile
from sd_lowvram.errors import BadInputError
from sd_lowvram.files import table as table_lines
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.settings import Settings
from sd_lowvram.streaming.blocks import Blocks, blocks_of
from sd_lowvram.streaming.layers import layers_of
from sd_lowvram.streaming.policies import POLICIES
from sd_lowvram.streaming.search import best_schedule, lower_bound
from sd_lowvram.streaming.simulator import CopyQueue, simulate
from sd_lowvram.streaming.timing import StepTiming, schedule_units, sort_by_timing, timing_of
from sd_lowvram.tracing.fake_model import fake_copy
from sd_lowvram.units import MIB

from .tables import written

SIZES = {"sd15": (512, 1024), "sd21": (768,), "sdxl": (1024,)}
SHARES = (50, 25, 10)
_COLUMNS = ("ours", *POLICIES, "bound")


@dataclass(frozen=True)
class Row:
    """A line of the table: slowdown of a step against resident weights, and device bytes, ring included.

    ``slowdown`` has the keys "ours", the three policies and "bound".
    """

    model: str
    size: str
    device: str
    share_percent: int
    device_mib: float
    resident_seconds: float
    slowdown: dict[str, float]


def run(
    models: Sequence[str] = ("sd15", "sdxl"),
    gpus: Sequence[str] = ("rtx2070",),
    width: int | None = None,
    height: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Compute the table, also into ``out`` as Markdown, and JSON next to it.

    Args:
        width, height: in pixels; None: sizes that are usual for the model.

    Raises:
        BadInputError: a model or a GPU that is not known.
    """
    cards = [profile(name) for name in gpus]
    unknown = [model for model in models if model not in NAMES]
    if unknown:
        raise BadInputError(f"--model {unknown[0]!r} is none of {', '.join(NAMES)}")
    wanted = [(model, size) for model in models for size in _sizes(model, width, height)]
    rows = [row for model, size in progress.report_each("schedule", wanted) for row in table(model, *size, cards)]
    return written({"rows": [dataclasses.asdict(row) for row in rows]}, lines, out)


def table(model: str, width: int, height: int, cards: Sequence[Rates]) -> list[Row]:
    """The rows of one model and size, a guided step in fp16, for several devices."""
    unet = anatomy_of_components("diffusers", build_components(model, torch.float16, "meta", only=("unet",)))
    costs = StageCosts(unet, Shape(width, height), False, torch.device("cuda"))
    stage = costs.stages[0]
    spans = costs(stage, Settings(attention="sdpa", inference_mode=True, channels_last=True)).spans
    layers = layers_of(fake_copy(unet, FakeTensorMode()).components)
    rows = []
    for rates in cards:
        denoiser, copies = unet.components[stage.component], CopyQueue(rates.copy_bandwidth)
        timing = timing_of(stage.component, denoiser, spans, rates, 2, copies)
        parts = blocks_of(sort_by_timing(layers, timing))
        rows += [_row(parts, timing, share, model, f"{width}x{height}", rates) for share in SHARES]
    return rows


def _row(parts: Blocks, timing: StepTiming, share: int, model: str, size: str, rates: Rates) -> Row:
    units, copies = schedule_units(parts.streamed, timing), timing.copies
    resident = sum(unit.seconds for unit in units)
    device_bytes = parts.bytes * share // 100
    room = device_bytes - parts.staying_bytes
    seconds = {name: simulate(units, policy(units, room), copies) for name, policy in POLICIES.items()}
    seconds |= {
        "ours": simulate(units, best_schedule(units, room, copies), copies),
        "bound": lower_bound(units, room, copies),
    }
    return Row(
        model=model,
        size=size,
        device=f"{rates.title} at {rates.half_flops / 1e12:.3g} TFLOP/s, {rates.copy_bandwidth / 1e9:.3g} GB/s",
        share_percent=share,
        device_mib=device_bytes / MIB,
        resident_seconds=resident,
        slowdown={name: seconds[name] / resident for name in _COLUMNS},
    )


def _sizes(model: str, width: int | None, height: int | None) -> list[tuple[int, int]]:
    if width is None and height is None:
        return [(side, side) for side in SIZES[model]]
    side = width or height or 0
    return [(width or side, height or side)]


_NOTE = (
    "Simulated: time of a guided step in fp16 over the same with all weights on the device. Device bytes are those of "
    "the weights that stay and of the ring together. Largest first keeps the largest units, first resident the first "
    "of a step, all streamed nothing; each uses the rest as its ring. No schedule passes the bound."
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The note, and a Markdown table for each model, size and device."""
    yield from ("# Streaming weights by schedule", "", _NOTE)
    rows = [Row(**row) for row in report["rows"]]
    for (model, size, gpu), group in itertools.groupby(rows, lambda row: (row.model, row.size, row.device)):
        same = list(group)
        yield from ("", f"## {model} {size}, {gpu}: {1000 * same[0].resident_seconds:.0f} ms a step", "")
        yield from table_lines(("on the device", *_COLUMNS), map(_cells, same))


def _cells(row: Row) -> list[str]:
    place = f"{row.share_percent} %, {row.device_mib:.0f} MiB"
    return [place, *(f"{row.slowdown[name]:.3f}" for name in _COLUMNS)]
