"""Predicted steps and decodes of a named H100, compared with measured ones."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.search import PlanSearch
from sd_lowvram.session import anatomy_of
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB
from sd_lowvram.weights import weight_bytes

from .models import random_vae
from .tables import Row, Sheet, filled

_STEPS = 20
FITTED = {
    ("sd15", 512, "all"), ("sd15", 512, "all, CUDA graphs"), ("sd15", 512, "25 %"), ("sd15", 1024, "50 %"),
    ("sd15", 1024, "25 %"), ("sd15", 1024, "10 %"), ("flux1-dev", 1024, "all"),
    ("sdxl", 1024, "decode in strips"), ("sd15", 2048, "decode in strips"),
}  # fmt: skip
"""What the profile's launches and wide products, replays, the engine's host time (by four rows) and the host time of
strips were fitted to."""
MEASURED: dict[tuple[str, int, str], Sequence[float]] = {
    ("sd15", 512, "all"): (28.6, 27.8),
    ("sd15", 512, "all, CUDA graphs"): (12.2, 10.5),
    ("sd15", 512, "25 %"): (57.3,),
    ("sd15", 1024, "all"): (48.1, 43.3, 49.4),
    ("sd15", 1024, "all, CUDA graphs"): (44.7,),
    ("sd15", 1024, "50 %"): (70.7,),
    ("sd15", 1024, "25 %"): (92.5,),
    ("sd15", 1024, "10 %"): (70.4,),
    ("z-image-turbo", 1024, "all"): (151.4, 158.3),
    ("z-image-turbo", 1024, "4 GiB"): (224.4, 229.2),
    ("z-image-turbo", 1024, "6 GiB"): (185.7,),
    ("z-image-turbo", 1024, "8 GiB"): (191.8,),
    ("flux1-dev", 1024, "all"): (179.7, 188.4),
    ("flux1-dev", 1024, "4 GiB"): (422.9, 454.7),
    ("flux1-dev", 1024, "6 GiB"): (406.2,),
    ("flux1-dev", 1024, "8 GiB"): (343.8,),
    ("sdxl", 1024, "all, decode"): (98,),
    ("sdxl", 1024, "decode in strips"): (826,),
    ("sd15", 2048, "all, decode"): (443,),
    ("sd15", 2048, "decode in strips"): (3197,),
}
"""Model, side, and weights on the GPU or budget: ms of a step or of a second decode, as in ``benchmarks/measured``."""
WITHIN = 0.25
_STRIPS = Settings(
    vae_tiles="exact", vae_map="parked", vae_strip_mib=4, vae_fused_kernels=False, offload="layer", inference_mode=True
)


@functools.lru_cache(1)
def _anatomy(model: str, decodes: bool) -> Anatomy:
    if decodes:  # the autoencoder alone, in fp16 for SDXL too
        return anatomy_of(random_vae(model, torch.float16, "meta"), None)
    return meta_anatomy(model, torch.float16 if model == "sd15" else torch.bfloat16)


def run(out: Path | None = None) -> dict[str, Any]:
    """Plan each row that was measured; writes ``out`` and JSON, row by row."""
    cases = [dict(zip(("model", "side", "way"), of, strict=True)) for of in MEASURED]
    return filled({"card": "H100"}, cases, _row, lines, out, "rows")


def _row(model: str, side: int, way: str) -> Row:
    measured = MEASURED[model, side, way]
    stated: dict[str, Any] = {"width": side, "height": side, "steps": _STEPS, "ram": 64 * GIB}
    stated["vram"] = int(way.split(maxsplit=1)[0]) * GIB if way.endswith("GiB") else 72 * GIB
    anatomy = _anatomy(model, "decode" in way)
    plan = PlanSearch(anatomy, request_by("ours", anatomy, gpu="h100", **stated), knobs(model, way), False).fastest()
    assert plan is not None
    component = anatomy.autoencoder if "decode" in way else anatomy.denoiser
    stage = next(stage for stage in plan.stages if stage.component == component and stage.name != "encode")
    predicted = 1000 * stage.seconds / (_STEPS if component == anatomy.denoiser else 1)
    return {"measured": list(measured), "predicted": predicted, "ratio": predicted / statistics.median(measured)}


def knobs(model: str, way: str) -> Settings:
    """Settings that are fixed in a row of :data:`MEASURED`."""
    if way.endswith("strips"):
        return _STRIPS
    if way.startswith("all"):
        fused: dict[str, Any] = {"vae_fused_kernels": False} if way.endswith("decode") else {}
        return Settings(offload="none", cuda_graphs=way.endswith("graphs"), **fused)
    if way.endswith("%"):
        weights = weight_bytes(_anatomy(model, False).components["unet"])
        return Settings(offload="blocks", weights_mib=weights * int(way.split(maxsplit=1)[0]) // 100 // MIB)
    return Settings()


def _measured(row: Row) -> str:
    least, most = min(row["measured"]), max(row["measured"])
    return f"{least:.1f}" if least == most else f"{least:.1f} to {most:.1f}"


def _ratio(row: Row) -> str:
    text = f"{row['ratio']:.2f}" if abs(row["ratio"] - 1) <= WITHIN else f"**{row['ratio']:.2f}**"
    return text + (", fitted" if (row["model"], row["side"], row["way"]) in FITTED else "")


_SHEET = Sheet(
    "Steps and decodes on an H100, predicted and measured",
    """Milliseconds of a denoising step, or of a second decode in a row. *Predicted*: by `plan --gpu h100`.
*Measured*: with random weights of full size ([the card](measured/nvidia-h100-80gb-hbm3.md),
[steps](measured/steps-on-h100.md)); equal rows of several runs are a range, and the ratio is to their median.
*Weights*: the share that is on the GPU, or the budget; strips of decodes take 4 MiB, and their maps are parked. Rows
marked as fitted gave the profile and the engine's host time their figures. Decodes with all weights on the GPU are by
the [measured time of one GroupNorm](measured/nvidia-h100-80gb-hbm3.md), which reads a group with one thread block.
Streamed rows are of the engine since 9c4f540; with the one before it they took 92, 97 and 106 ms at 1024x1024. No
step at the least budget, and none of SDXL, was timed by itself on a card yet.""",
    (
        ("model", "{model}"),
        ("picture", "{side}x{side}"),
        ("weights", "{way}"),
        ("predicted ms", lambda row: f"{row['predicted']:.1f}"),
        ("measured ms", _measured),
        ("ratio", _ratio),
    ),
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown, with what differs by more than a quarter."""
    yield from _SHEET.lines(report)
    held_out = [row for row in report["rows"] if (row["model"], row["side"], row["way"]) not in FITTED]
    within = sum(abs(row["ratio"] - 1) <= WITHIN for row in held_out)
    far = any(abs(row["ratio"] - 1) > WITHIN for row in report["rows"])
    yield ""
    yield (
        f"Of {len(held_out)} rows that nothing was fitted to, {within} are within {WITHIN:.0%}."
        + " Bold rows are not." * far
    )
