"""The prediction before a run, and its comparison with the run."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy
import torch
from torch import Tensor

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.planning.memory_profile import MeasuredRun
from ..sd_lowvram.planning.plan import Plan
from . import host
from .autoencoder import plan_autoencoder
from .bars import memory_bars
from .inputs import BATCH, BUDGET, MODEL, SETTINGS, STEPS, VAE, checked_budget, side
from .interfaces import HostVAE, ModelPatcher
from .node_request import ChosenSettings, NodeRequest, PlanRecord, settings_or_default
from .optimising import ALIASES, CATEGORY
from .refusals import UnservedVAEError
from .report_text import measured_peaks, report_text, stage_of
from .sampling import foresee_sampling, optimized_model

_NO_PLAN = (
    "nothing to report: there is no plan. If Low VRAM is bypassed, the run was ComfyUI's own; otherwise connect the "
    "plan of Low VRAM to this node"
)
_TOOLTIPS = ("the text that the node shows", "a plot of the memory of each stage, with the budget as a line")


class LowVRAMPlan:
    """The plan of a MODEL and a VAE for a size, before anything runs."""

    DESCRIPTION = "Predicts memory and time of each stage for a size and a budget, and draws them. Nothing runs."
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "plan"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING", "IMAGE")
    RETURN_NAMES = ("text", "plot")
    OUTPUT_TOOLTIPS = _TOOLTIPS

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
                "steps": STEPS,
            },
            "optional": {"settings": SETTINGS},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return checked_budget(budget)

    def plan(
        self,
        model: ModelPatcher,
        vae: HostVAE,
        budget: str,
        width: int,
        height: int,
        batch: int,
        steps: int,
        settings: ChosenSettings | None = None,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        node_request = NodeRequest(budget, settings_or_default(settings).settings, steps)
        record = PlanRecord(steps=steps)
        with host.refusals_in(unique_id):
            foresee_sampling(optimized_model(model, node_request, record), width, height, batch)
            if record.untold:
                raise BadInputError(record.untold)
            try:
                plan_autoencoder(vae, node_request, record, record.plans["denoise"].request)
            except UnservedVAEError as error:
                record.say(f"the decode is not predicted: {error}")
        return _report_result(record)


class LowVRAMReport:
    """Measured against predicted, after the run."""

    DESCRIPTION = (
        "Compares memory and time of each stage with the plan. Connect the finished pictures, so that it runs last."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "report"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING", "IMAGE")
    RETURN_NAMES = ("text", "plot")
    OUTPUT_TOOLTIPS = _TOOLTIPS

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        plan = "LOWVRAM_PLAN", {"tooltip": "the plan of the Low VRAM node before the sampler"}
        after = "IMAGE", {"tooltip": "the finished pictures, so that the report comes last"}
        return {"required": {"images": after}, "optional": {"plan": plan}}

    def report(self, images: Tensor, plan: PlanRecord | None = None) -> dict[str, Any]:
        """Show ``plan``; the page sends none where Low VRAM is bypassed."""
        return _report_result(PlanRecord(untold=_NO_PLAN) if plan is None else plan)


def _report_result(record: PlanRecord) -> dict[str, Any]:
    text = report_text(record)
    return {"ui": {"text": [text]}, "result": (text, _plot(record))}


def _joined_plan(record: PlanRecord) -> Plan:
    """The plans of all stages as one; the host moves models in and out between them."""
    stages = tuple(stage_of(plan, name) for name, plan in record.plans.items())
    widest = max(record.plans.values(), key=lambda plan: plan.predicted.peak_bytes)
    sizes = {name: max(getattr(stage, name) for stage in stages) for name in ("peak_bytes", "host_bytes")}
    return dataclasses.replace(widest, stages=stages, predicted=dataclasses.replace(widest.predicted, **sizes))


def _plot(record: PlanRecord) -> Tensor:
    """The memory of every stage as an IMAGE (1, H, W, 3) in [0, 1]."""
    from PIL import Image

    from ..sd_lowvram.plots.memory import memory_png

    if not record.plans:  # nothing could be predicted
        return torch.ones(1, 1, 1, 3)
    run = (
        MeasuredRun(tuple(stage for stages in record.measured.values() for stage in stages))
        if record.measured
        else None
    )
    try:
        picture = Image.open(io.BytesIO(memory_png(_joined_plan(record), run)))
    except BadInputError:  # no matplotlib
        picture = memory_bars(_joined_plan(record), measured_peaks(record))
    return torch.from_numpy(numpy.asarray(picture.convert("RGB"), dtype=numpy.float32) / 255)[None]
