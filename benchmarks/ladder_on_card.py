"""``ladder-on-card``: the steps of two published ladders, predicted for the GPUs of their sources; none runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

from .tables import Columns, rows_table, written

_CARDS = {"B": "titan-rtx", "E": "a10g"}
"""GPUs by source, as ``ladder`` names them: diffusers' page on memory and speed, a serving company's page."""
_SIDE, _STEPS, _RAM = 512, 50, 32 * GIB
_POLICY = "diffusers-default"
_SCORES = {"attention": "sliced", "attention_mib": 65536}
"""Attention of 2022 and before: all scores at once."""
_FP16, _LAST = torch.float16, {"channels_last": True}
_GPU = "`make gpu PART=kernels`"

_RUNGS: dict[str, tuple[tuple[str, torch.dtype, dict[str, Any], float | None, str], ...]] = {
    "B": (
        ("original", torch.float32, _SCORES, 1.0, ""),
        ("fp16", _FP16, _SCORES, 2.63, ""),
        ("channels last", _FP16, {**_SCORES, **_LAST}, 2.88, ""),
        ("memory-efficient attention", _FP16, _LAST, 3.61, ""),
        ("fused kernels", _FP16, {**_LAST, "fused_kernels": True}, None, _GPU),
        ("CUDA graphs", _FP16, {**_LAST, "fused_kernels": True, "cuda_graphs": True}, None, _GPU),
    ),
    "E": (
        ("fp32", torch.float32, _SCORES, 1.0, ""),
        ("fp16", _FP16, _SCORES, 2.46, ""),
        ("fused kernels, and attention without scores", _FP16, {"fused_kernels": True}, 4.20, _GPU),
        ("CUDA graphs", _FP16, {"fused_kernels": True, "cuda_graphs": True}, None, _GPU),
    ),
}
"""Steps by source: name, type, knobs, published speed-up over the first, and what measures it."""


def run(*, out: Path | None) -> dict[str, Any]:
    """Foretell both ladders; with ``out`` written as Markdown, and as JSON beside it."""
    return written({"ladders": [foretold(source) for source in _RUNGS]}, lines, out)


def foretold(source: str) -> dict[str, Any]:
    """Seconds of a picture of SD1.5 that plans tell for each rung of ``source``, with those below it."""
    card = _CARDS[source]
    rows: list[dict[str, Any]] = []
    for name, dtype, knobs, published, measured_by in _RUNGS[source]:
        anatomy = meta_anatomy("sd15", dtype)
        request = request_by(_POLICY, anatomy, gpu=card, ram=_RAM, width=_SIDE, height=_SIDE, steps=_STEPS)
        settings = dataclasses.replace(Settings.policy(_POLICY), **knobs)
        seconds = make_plan(anatomy, request, settings).predicted.seconds
        ratio = rows[0]["seconds"] / seconds if rows else 1.0
        row = {"name": name, "published": published, "seconds": seconds, "ratio": ratio}
        rows.append({**row, "measured_by": measured_by or f"`python -m benchmarks ladder --of {source}`"})
    return {"source": source, "card": profile(card).title, "rows": rows}


_COLUMNS: Columns = (
    ("rung, not run here", "{name}"),
    ("published, times as fast", lambda row: "" if row["published"] is None else f"{row['published']:.2f}"),
    ("foretold, s", "{seconds:.2f}"),
    ("foretold, times as fast", "{ratio:.2f}"),
    ("measured by", "{measured_by}"),
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Result of :func:`run` as Markdown."""
    yield "# Published ladders on their cards: not run here, foretold"
    yield ""
    yield (
        f"Whole pictures of SD1.5, {_SIDE}x{_SIDE}, {_STEPS} steps: what plans tell, each rung with those above it. "
        "None of it was measured. A traced UNet and inference mode launch the same kernels, so plans know no "
        "difference. The last column names what measures a rung where the card is."
    )
    for ladder in report["ladders"]:
        yield ""
        yield f"## Source {ladder['source']}, on its {ladder['card']}"
        yield ""
        yield from rows_table(_COLUMNS, ladder["rows"])
