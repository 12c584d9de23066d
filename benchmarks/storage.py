"""``storage``: how far weights in 8 bits take the demo model's pictures, and its layers, off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.files.tables import table
from sd_lowvram.hooks.weight_storage import quantised_layers
from sd_lowvram.kernels.quantised import quantise, widen
from sd_lowvram.session import anatomy_of, attached
from sd_lowvram.settings import Settings
from sd_lowvram.weights import weight_bytes

from .models import demo_pipeline
from .tables import eight_bits, written

KINDS = ("fp8", "int8")
PROMPTS = ("a red apple", "a teapot", "a rocket", "a castle", "a snowman", "a guitar", "a sunflower", "a bicycle")


def run(prompts: Sequence[str] = PROMPTS, steps: int = 25, out: Path | None = None) -> dict[str, Any]:
    """Measure, also into ``out`` as Markdown, and JSON beside it.

    Every prompt is drawn in float32 with its own seed, then anew with the weights stored in each of the two ways.
    """
    pipe = demo_pipeline()
    plain = _pictures(pipe, prompts, steps, 0)
    whole = weight_bytes(pipe.unet, pipe.text_encoder)
    rows = []
    for number, kind in enumerate(KINDS, 1):
        row: dict[str, Any] = {"storage": kind} | _layer_errors(pipe, kind)
        with attached(pipe, Settings(weight_storage=kind), device="cpu"):
            row["bytes"] = weight_bytes(pipe.unet, pipe.text_encoder) / whole
            row |= _differences(_pictures(pipe, prompts, steps, number), plain)
        rows.append(row)
    return written({"prompts": list(prompts), "steps": steps, "rows": rows}, lines, out)


def _pictures(pipe: Any, prompts: Sequence[str], steps: int, turn: int) -> Tensor:
    """(prompts, 3, H, W) in [0, 1]."""
    drawn = []
    for number, prompt in enumerate(prompts):
        given = {"num_inference_steps": steps, "guidance_scale": 4.0, "output_type": "pt"}
        with torch.inference_mode():
            drawn.append(pipe(prompt, generator=torch.Generator().manual_seed(number), **given).images.float())
        progress.report("pictures", turn * len(prompts) + number + 1, (len(KINDS) + 1) * len(prompts))
    return torch.cat(drawn)


def _differences(pictures: Tensor, plain: Tensor) -> dict[str, Any]:
    """Mean and largest difference of 255 of pictures rounded to 8 bits, and the mean PSNR."""
    apart = (eight_bits(pictures) - eight_bits(plain)).abs()
    squares = (pictures - plain).double().square().mean(dim=(1, 2, 3))
    return {
        "mean": float(apart.mean()),
        "most": int(apart.max()),
        "psnr": float((-10 * squares.clamp_min(1e-20).log10()).mean()),
        "worst_psnr": float(-10 * math.log10(float(squares.max()) or 1e-20)),
    }


def _layer_errors(pipe: Any, kind: str) -> dict[str, Any]:
    """Relative errors ||stored - weight|| / ||weight|| of all layers: their mean and the largest."""
    anatomy = anatomy_of(pipe)
    weights = [layer.weight.detach() for name in anatomy.components for layer in quantised_layers(anatomy, name)]
    errors = [float((widen(*quantise(weight, kind)) - weight).norm() / weight.norm()) for weight in weights]
    return {"layers": len(errors), "layer_error": sum(errors) / len(errors), "worst_layer_error": max(errors)}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    yield from ("# Weights in 8 bits", "")
    yield f"{len(report['prompts'])} pictures of the demo model, {report['steps']} steps, beside float32 weights."
    yield "Difference: of 8-bit pictures, of 255. PSNR in dB. Layers: relative error of their weights, mean and worst."
    yield ""
    yield from table(_HEADS, map(_cells, report["rows"]))


_HEADS = (
    *("storage", "bytes of float32's", "mean difference", "largest", "PSNR", "worst PSNR"),
    *("layers", "worst layer"),
)


def _cells(row: dict[str, Any]) -> list[str]:
    pictures = [f"{row['mean']:.2f}", f"{row['most']}", f"{row['psnr']:.1f}", f"{row['worst_psnr']:.1f}"]
    layers = [f"{100 * row[name]:.2f} %" for name in ("layer_error", "worst_layer_error")]
    return [row["storage"], f"{100 * row['bytes']:.0f} %", *pictures, *layers]
