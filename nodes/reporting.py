"""What is foretold before a run, and how it compares with what the run took."""

from __future__ import annotations

import dataclasses
import io
import logging
from typing import Any

import numpy
import torch
from torch import Tensor

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.planning.memory_profile import Run
from ..sd_lowvram.planning.plan import Plan, StagePlan
from ..sd_lowvram.units import format_size
from .autoencoder import foreseen_vae
from .bars import memory_bars
from .denoiser import optimized_model
from .inputs import BATCH, BUDGET, knob_inputs, settings_of, side
from .node_request import Record, Wish, attachable
from .optimising import CATEGORY


class _Shown:
    """What both nodes give: the record, and the same as text and as a plot."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("LOWVRAM_PLAN", "STRING", "IMAGE")
    RETURN_NAMES = ("plan", "text", "plot")
    OUTPUT_NODE = True


class LowVRAMPlan(_Shown):
    """The plan of a MODEL and a VAE for a size, before anything runs."""

    DESCRIPTION = "Foretells for a size and a budget what each stage takes, and draws it. Nothing is run."
    FUNCTION = "plan"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "vae": ("VAE",),
                "budget": BUDGET,
                "width": side("width"),
                "height": side("height"),
                "batch": BATCH,
            },
            "optional": knob_inputs("denoise", "decode", "encode"),
        }

    def plan(
        self, model: Any, vae: Any, budget: str, width: int, height: int, batch: int, **knobs: Any
    ) -> dict[str, Any]:
        wish = Wish(budget, settings_of(knobs))
        _, record = optimized_model(model, wish, width, height, batch)
        foreseen_vae(vae, wish, record, record.plans["denoise"].request)
        return _shown(record)


class LowVRAMReport(_Shown):
    """Measured against predicted, after the run."""

    DESCRIPTION = (
        "Compares what each stage took with what its plan foretold. Connect the finished pictures: it runs then."
    )
    FUNCTION = "report"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        after = "IMAGE", {"tooltip": "the pictures of the run, so that the report comes after it"}
        return {"required": {"plan": ("LOWVRAM_PLAN",), "images": after}}

    def report(self, plan: Record, images: Tensor) -> dict[str, Any]:
        return _shown(plan)


def _shown(record: Record) -> dict[str, Any]:
    text = told(record)
    logging.info("sd-lowvram:\n" + text)
    return {"ui": {"text": [text]}, "result": (record, text, _plot(record))}


def told(record: Record) -> str:
    """The record as lines for people."""
    plan = _joined(record)
    request, both = plan.request, plan.request.device.type == "cpu"  # its allocator counts host memory too
    lines = [
        f"{request.width}x{request.height}, batch {request.batch}, budget {format_size(request.vram)}, "
        f"seconds for {request.steps} steps",
        f"{'stage':<9}{'planned':>10}{'weights':>10}{'host':>10}{'seconds':>9}{'measured':>10}",
    ]
    peaks = _measured_peaks(record)
    for stage in plan.stages:
        sizes = (stage.held_bytes if both else stage.peak_bytes, stage.weights_bytes, stage.host_bytes)
        figures = "".join(f"{format_size(size):>10}" for size in sizes)
        measured = format_size(peaks[stage.name]) if stage.name in peaks else "-"
        lines.append(f"{stage.name:<9}{figures}{stage.seconds:>9.1f}{measured:>10}")
    lines += [f"{name}: {_choices(plan, name)}" for name, plan in record.plans.items()]
    if record.sites:
        lines.append("sites: " + ", ".join(f"{name} {count}" for name, count in sorted(record.sites.items())))
    return "\n".join(lines)


def _measured_peaks(record: Record) -> dict[str, int]:
    return {name: max(one.peak_bytes for one in stages) for name, stages in record.measured.items() if stages}


def _choices(plan: Plan, name: str) -> str:
    attached = {knob: value for knob, _, value in attachable(plan.settings).of_stage(name).decided()}
    decided = {**attached, **_stage(plan, name).choice}
    return ", ".join(f"{knob} {value}" for knob, value in decided.items() if value is not None) or "as it is"


def _stage(plan: Plan, name: str) -> StagePlan:
    return next(stage for stage in plan.stages if stage.name == name)


def _as_run(plan: Plan, name: str) -> StagePlan:
    """A stage as the host runs it. On a CPU it streams nothing: there the weights are held once, and whole."""
    stage = _stage(plan, name)
    if plan.request.device.type != "cpu" or plan.settings.offload in (None, "none", "component"):
        return stage
    weights = stage.host_bytes - stage.parked_bytes
    return dataclasses.replace(
        stage,
        peak_bytes=weights + stage.activation_bytes,
        weights_bytes=weights,
        host_bytes=stage.parked_bytes,
        held_bytes=weights + stage.activation_bytes + stage.parked_bytes,
    )


def _joined(record: Record) -> Plan:
    """The plans of all stages as one; the host moves models in and out between them."""
    stages = tuple(_as_run(plan, name) for name, plan in record.plans.items())
    widest = max(record.plans.values(), key=lambda plan: plan.predicted.peak_bytes)
    sizes = {name: max(getattr(stage, name) for stage in stages) for name in ("peak_bytes", "host_bytes")}
    return dataclasses.replace(widest, stages=stages, predicted=dataclasses.replace(widest.predicted, **sizes))


def _plot(record: Record) -> Tensor:
    """The memory of every stage as an IMAGE (1, H, W, 3) in [0, 1]."""
    from PIL import Image

    from ..sd_lowvram.planning.plots import memory_png

    run = Run(tuple(stage for stages in record.measured.values() for stage in stages)) if record.measured else None
    try:
        picture = Image.open(io.BytesIO(memory_png(_joined(record), run)))
    except BadInputError:  # no matplotlib
        picture = memory_bars(_joined(record), _measured_peaks(record))
    return torch.from_numpy(numpy.asarray(picture.convert("RGB"), dtype=numpy.float32) / 255)[None]
