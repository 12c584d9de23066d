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
from ..sd_lowvram.planning.memory_profile import MeasuredRun
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.planning.request import DEFAULT_STEPS
from .autoencoder import plan_autoencoder
from .bars import memory_bars
from .denoiser import optimized_model
from .inputs import BATCH, BUDGET, MODEL, VAE, knob_inputs, settings_of, side, validated, with_steps
from .interfaces import HostVAE, ModelPatcher
from .node_request import NodeRequest, PlanRecord
from .optimising import CATEGORY
from .report_text import measured_peaks, report_text, stage_of


class _Shown:
    """What both nodes give: the record, and the same as text, which the node shows too, and as a plot."""

    CATEGORY = CATEGORY
    RETURN_TYPES = ("LOWVRAM_PLAN", "STRING", "IMAGE")
    RETURN_NAMES = ("plan", "text", "plot")
    OUTPUT_NODE = True
    OUTPUT_TOOLTIPS = (
        "for Optimize Model and the nodes of the VAE: what is shown here is what they run",
        "what the node shows, as text",
        "the memory of every stage as a picture, the budget a line across it",
    )


class LowVRAMPlan(_Shown):
    """The plan of a MODEL and a VAE for a size, before anything runs."""

    DESCRIPTION = "Foretells for a size and a budget what each stage takes, and draws it. Nothing is run."
    FUNCTION = "plan"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": MODEL,
                "vae": VAE,
                "budget": BUDGET,
                "width": side("width"),
                "height": side("height"),
                "batch": BATCH,
            },
            "optional": with_steps(knob_inputs("denoise", "decode", "encode")),
        }

    @classmethod
    def VALIDATE_INPUTS(
        cls, budget: str | None = None, width: int | None = None, height: int | None = None
    ) -> bool | str:
        return validated(budget, width=width, height=height)

    def plan(
        self,
        model: ModelPatcher,
        vae: HostVAE,
        budget: str,
        width: int,
        height: int,
        batch: int,
        steps: int = DEFAULT_STEPS,
        **knobs: Any,
    ) -> dict[str, Any]:
        node_request = NodeRequest(budget, settings_of(knobs), steps)
        _, record = optimized_model(model, node_request, width, height, batch)
        plan_autoencoder(vae, node_request, record, record.plans["denoise"].request)
        record.node_request = node_request
        return _shown(record)


class LowVRAMReport(_Shown):
    """Measured against predicted, after the run."""

    DESCRIPTION = (
        "Compares what each stage took with what its plan foretold. Connect the finished pictures: it runs then."
    )
    FUNCTION = "report"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        plan = "LOWVRAM_PLAN", {"tooltip": "of the Optimize Model that the sampler's model went through"}
        after = "IMAGE", {"tooltip": "the pictures of the run, so that the report comes after it"}
        return {"required": {"plan": plan, "images": after}}

    def report(self, plan: PlanRecord, images: Tensor) -> dict[str, Any]:
        return _shown(plan)


def _shown(record: PlanRecord) -> dict[str, Any]:
    text = report_text(record)
    logging.info("sd-lowvram:\n" + text)
    return {"ui": {"text": [text]}, "result": (record, text, _plot(record))}


def _joined(record: PlanRecord) -> Plan:
    """The plans of all stages as one; the host moves models in and out between them."""
    stages = tuple(stage_of(plan, name) for name, plan in record.plans.items())
    widest = max(record.plans.values(), key=lambda plan: plan.predicted.peak_bytes)
    sizes = {name: max(getattr(stage, name) for stage in stages) for name in ("peak_bytes", "host_bytes")}
    return dataclasses.replace(widest, stages=stages, predicted=dataclasses.replace(widest.predicted, **sizes))


def _plot(record: PlanRecord) -> Tensor:
    """The memory of every stage as an IMAGE (1, H, W, 3) in [0, 1]."""
    from PIL import Image

    from ..sd_lowvram.plots.memory import memory_png

    run = (
        MeasuredRun(tuple(stage for stages in record.measured.values() for stage in stages))
        if record.measured
        else None
    )
    try:
        picture = Image.open(io.BytesIO(memory_png(_joined(record), run)))
    except BadInputError:  # no matplotlib
        picture = memory_bars(_joined(record), measured_peaks(record))
    return torch.from_numpy(numpy.asarray(picture.convert("RGB"), dtype=numpy.float32) / 255)[None]
