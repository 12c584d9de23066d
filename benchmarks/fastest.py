"""``fastest``: a guided step of SD1.5 and a decode as fast as they get here, beside diffusers' own."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.devices.info import default_device
from sd_lowvram.devices.pairs import compared
from sd_lowvram.hooks.packed_weights import packable
from sd_lowvram.kernels import compiler, packed
from sd_lowvram.session import anatomy_of, attached
from sd_lowvram.settings import Settings

from .ladder import has_bfloat16, inputs, step
from .models import demo_pipeline, random_pipeline
from .tables import Sheet, facts, pair_columns, written

_LOSSLESS, _HALF, _DECODE = "lossless step", "step with bfloat16 allowed", "lossless decode"


def run(
    model: str = "sd15", *, pairs: int = 15, decode_pairs: int = 3, compiled: bool = False, out: Path | None = None
) -> dict[str, Any]:
    """Measure steps at 256x256 and decodes at 512x512 (of the demo model at 128x128), inference mode on both sides.

    Args:
        compiled: what takes minutes to compile too.
    """
    device = default_device()
    pipe = demo_pipeline() if model == "demo" else random_pipeline(model, torch.device("cpu"))
    sizes = (128, 128) if model == "demo" else (256, 512)
    ways, left_out = _ways(device, compiled, bool(packable(anatomy_of(pipe.unet))))
    rows = []
    with torch.inference_mode():
        for part, name, settings in progress.counted("ways", ways):
            decodes = part == _DECODE
            target = pipe.vae if decodes else pipe.unet
            call = functools.partial(_decode if decodes else step, given=_given(pipe, decodes, sizes[decodes], device))
            plain = copy.deepcopy(target)
            with attached(target, settings, device=device):
                count = decode_pairs if decodes else pairs
                found = compared(functools.partial(call, plain), functools.partial(call, target), count, device)
            rows.append({"part": part, "name": name, "pairs": count, **found})
    shared = {"sizes": list(sizes), "rows": rows, "left_out": left_out}
    return written(facts(None if model == "demo" else model, **shared), lines, out)


def _ways(device: torch.device, compiled: bool, large: bool) -> tuple[list[tuple[str, str, Settings]], dict[str, str]]:
    """Ways that are measured, and the reasons why others are not."""
    last, left = Settings(channels_last=True), {}
    found = []
    why = packed.why_not(device) or (None if large else "the model has no convolutions that are large enough")
    if why is None:
        found.append((_LOSSLESS, "packed weights", Settings(packed_weights=True)))
    else:
        left["packed weights"] = why
    half = Settings(precision="bf16", channels_last=True)
    if has_bfloat16():
        found.append((_HALF, "bfloat16, channels last", half))
    else:
        left[_HALF] = "this CPU has no instructions for 16 bits, and torch would imitate them"
    found.append((_DECODE, "channels last", last))
    if device.type == "cpu" and large:  # a demo model's layers are narrow as well
        found.append((_DECODE, "winograd", Settings(winograd=True)))
    why = compiler.why_not(device) or (None if compiled else "not asked for (--compiled)")
    if why is None:
        regional = Settings(compile="regional", channels_last=True)
        found += [(part, "compiled, channels last", regional) for part in (_LOSSLESS, _DECODE)]
        if packed.why_not(device) is None and large:
            found.append((_LOSSLESS, "compiled, packed weights", regional.filled(packed_weights=True)))
    else:
        left["compiled"] = why
    return sorted(found, key=lambda way: way[0] == _DECODE), left


def _given(pipe: Any, decodes: bool, size: int, device: torch.device) -> Any:
    if not decodes:
        return inputs(pipe.unet, size, device)
    return torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(0)).to(device)


def _decode(vae: Any, given: Tensor) -> Tensor:
    pixels: Tensor = vae.decode(given, return_dict=False)[0]
    return pixels


lines = Sheet(
    "As fast as it gets, beside diffusers as it is",
    "{model} in float32 on {device} with {threads} threads (torch {torch}): guided steps at {sizes[0]}x{sizes[0]}, "
    "decodes at {sizes[1]}x{sizes[1]}; both sides in inference mode, in turn within one process, medians.",
    (
        ("of", "{part}"),
        ("way", "{name}"),
        *pair_columns("diffusers, s", "ours, s", "{:.2f}"),
        ("error", "{error:.0e}"),
        ("pairs", "{pairs}"),
        ("first call, seconds more", "{warm_up_seconds:.1f}"),
    ),
).lines
