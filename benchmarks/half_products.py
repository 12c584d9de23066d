"""Today's transformers with fp16 products: predicted seconds a step on GPUs without bf16; errors and peaks of full-size
blocks, measured on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sd_lowvram.checkpoints.architectures import TRANSFORMERS
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.errors import BudgetError
from sd_lowvram.memory import measured_peak
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.search import make_plan
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.planning.stages import Shape
from sd_lowvram.session import attached
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

from . import todays_blocks
from .tables import Row, Sheet, filled

CARDS = {"rtx2060": 6, "gtx1650": 4}
"""GPUs, with the GiB of each."""
MEASURED = ("z-image", "sd3.5-large")
"""Models whose blocks are run; in fp16 a CPU needs minutes for each."""
_STEPS = 20
_HALF = Settings(precision="fp16-products")


def run(
    models: Sequence[str] = TRANSFORMERS, side: int = 1024, measured: int = 256, *, out: Path | None
) -> dict[str, Any]:
    """Plan the models in bf16 for both cards and run blocks of them here; writes ``out`` and JSON, model by model.

    Args:
        side: of the pictures that are planned.
        measured: of those whose blocks are run.
    """
    asked = {"side": side, "measured": measured, "steps": _STEPS}
    cases = [{"model": model} for model in models]
    return filled(asked, cases, functools.partial(_row, side, measured), SHEET.lines, out, "models")


def _row(side: int, measured: int, model: str) -> dict[str, Any]:
    anatomy = meta_anatomy(model, torch.bfloat16)
    row: dict[str, Any] = {}
    for card, gib in CARDS.items():
        request = request_by(
            "ours", anatomy, gpu=card, vram=gib * GIB, ram=64 * GIB, width=side, height=side, steps=_STEPS
        )
        for way, settings in (("plain", Settings()), ("half", _HALF)):
            with contextlib.suppress(BudgetError):
                plan = make_plan(anatomy, request, settings, least=False)
                row[f"{card} {way}"] = next(one.seconds for one in plan.stages if one.name == "denoise") / _STEPS
    return row | (_measured(model, measured) if model in MEASURED else {})


def _measured(model: str, side: int) -> dict[str, Any]:
    """Measure the first blocks: relative errors to float32, and the peak next to the planned one."""
    anatomy = todays_blocks._anatomy(model, "transformer", "bfloat16")
    transformer = anatomy.components["transformer"]
    costs = StageCosts(anatomy, Shape(side, side), False, torch.device("cpu"))
    stage = next(one for one in costs.stages if one.component == "transformer")
    given = tree_map(todays_blocks._drawn, stage.inputs())
    results: list[Tensor] = []

    def call() -> None:
        results.append(stage.run(*given))

    def peak(settings: Settings) -> int:
        with torch.inference_mode(), attached(transformer, settings, device="cpu"):
            return measured_peak(call)

    _, half = peak(Settings(precision="fp32", offload="layer")), peak(_HALF)
    peak(Settings())
    wide, made, bf16 = (one.float() for one in results)
    return {
        "bf16_error": float((bf16 - wide).norm() / wide.norm()),
        "half_error": float((made - wide).norm() / wide.norm()),
        "measured_over_planned": half / costs(stage, _HALF).allocated_peak_bytes,
    }


def _told(name: str, form: str, lacking: str = "") -> Callable[[Row], str]:
    return lambda row: form.format(row[name]) if name in row else lacking


SHEET = Sheet(
    title="Products in fp16 on cards without bf16",
    note=(
        "*Seconds a step* at {side}x{side} with 64 GiB of host memory, as plans foretell them for the model as it is "
        '(*bf16*) and with `precision="fp16-products"` (*fp16*); nothing ran on a card. Which products of published '
        "weights overflow is not known here: they take the time of float32, and none is in the figures. "
        "*Error*: relative, of two blocks of each kind in full width with random weights at {measured}x{measured}, run "
        "on a CPU, to the same weights in float32. *Peak*: of that run in fp16, over the planned one."
    ),
    columns=(
        ("model", "`{model}`"),
        ("RTX 2060, 6 GiB: bf16", _told("rtx2060 plain", "{:.1f}", "does not fit")),
        ("fp16", _told("rtx2060 half", "{:.1f}", "does not fit")),
        ("GTX 1650, 4 GiB: bf16", _told("gtx1650 plain", "{:.1f}", "does not fit")),
        ("fp16", _told("gtx1650 half", "{:.1f}", "does not fit")),
        ("error, bf16", _told("bf16_error", "{:.1e}")),
        ("error, fp16", _told("half_error", "{:.1e}")),
        ("peak", _told("measured_over_planned", "{:.4f}")),
    ),
)

lines = SHEET.lines
