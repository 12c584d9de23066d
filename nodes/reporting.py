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
from ..sd_lowvram.plans import Plan
from ..sd_lowvram.recording import Run
from ..sd_lowvram.sizes import format_size
from .autoencoder import foreseen_vae
from .denoiser import optimized_model
from .inputs import BATCH, BUDGET, knob_inputs, settings_of, side
from .optimising import CATEGORY
from .wish import Record, Wish


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
    request = _joined(record).request
    lines = [
        f"{request.width}x{request.height}, batch {request.batch}, budget {format_size(request.vram)}, "
        f"seconds for {request.steps} steps",
        f"{'stage':<9}{'planned':>10}{'weights':>10}{'host':>10}{'seconds':>9}{'measured':>10}",
    ]
    for name, plan in record.plans.items():
        stage = next(one for one in plan.stages if one.name == name)
        peaks = [one.peak_bytes for one in record.measured.get(name, ())]
        both = plan.request.device.type == "cpu"  # its allocator counts what waits in host memory too
        sizes = (stage.held_bytes if both else stage.peak_bytes, stage.weights_bytes, stage.host_bytes)
        figures = "".join(f"{format_size(size):>10}" for size in sizes)
        lines.append(f"{name:<9}{figures}{stage.seconds:>9.1f}{format_size(max(peaks)) if peaks else '-':>10}")
    lines += [f"{name}: {_choices(record, plan, name)}" for name, plan in record.plans.items()]
    if record.sites:
        lines.append("sites: " + ", ".join(f"{name} {count}" for name, count in sorted(record.sites.items())))
    return "\n".join(lines)


def _choices(record: Record, plan: Plan, name: str) -> str:
    stage = next(one for one in plan.stages if one.name == name)
    decided = {**stage.choice, "attention": plan.settings.attention}
    return ", ".join(f"{knob} {value}" for knob, value in decided.items() if value is not None) or "as it is"


def _joined(record: Record) -> Plan:
    """The plans of all stages as one, for the plot; the host moves models in and out between them."""
    plans = list(record.plans.items())
    stages = tuple(stage for name, plan in plans for stage in plan.stages if stage.name == name)
    widest = max((plan for _, plan in plans), key=lambda plan: plan.predicted.peak_bytes)
    return dataclasses.replace(widest, stages=stages)


def _plot(record: Record) -> Tensor:
    """The memory of every stage as an IMAGE (1, H, W, 3) in [0, 1]."""
    from PIL import Image, ImageDraw

    from ..sd_lowvram.plots import memory_png

    run = Run(tuple(stage for stages in record.measured.values() for stage in stages)) if record.measured else None
    try:
        picture = Image.open(io.BytesIO(memory_png(_joined(record), run)))
    except BadInputError as error:  # no matplotlib
        picture = Image.new("RGB", (720, 40), "white")
        ImageDraw.Draw(picture).text((12, 14), str(error), fill="black")
    return torch.from_numpy(numpy.asarray(picture.convert("RGB"), dtype=numpy.float32) / 255)[None]
