"""``python -m benchmarks ladder``: how much faster each rung of a published ladder makes a guided step of SD1.5 here.

Source B is diffusers' page on memory and speed (TITAN RTX, 512x512, 50 DDIM steps), source E a serving company's page
(A10G); their figures are of whole pictures. Each rung has those below it too, as in the sources; ours follow.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sd_lowvram import progress
from sd_lowvram.devices.info import default_device
from sd_lowvram.devices.pairs import compare
from sd_lowvram.hooks.numbers.packed_weights import packable
from sd_lowvram.kernels import compiler
from sd_lowvram.kernels.triton import support as triton
from sd_lowvram.session import anatomy_of, attached
from sd_lowvram.settings import Fidelity, Settings, knobs

from .models import demo_pipeline, random_denoiser
from .tables import Sheet, facts, pair_columns, written

SOURCES = {
    "B": "diffusers' page on memory and speed, TITAN RTX, 512x512, 50 steps: 9.50 s at first",
    "E": "a serving company's page, A10G: 11.26 s at first",
}
_CALLED = tuple[Tensor, Tensor, Tensor]
_SECOND = {"traced", "cuda_graphs"}
"""Knobs that look at the second call, which then is the one that takes longer."""


@dataclass(frozen=True)
class LadderRow:
    """A row of a ladder.

    Attributes:
        published: speed-up over the first row in the source; None: the row is ours.
        knobs: our knobs of the row.
        made: further changes to the UNet: "fused" products of queries, keys, values; "kept" from the previous row, like
            its trace for other processes.
        inference: True for inference mode; else only gradients are off.
    """

    name: str
    published: float | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    made: str = ""
    inference: bool = True

    @property
    def fidelity(self) -> Fidelity:
        found = [knobs()[name].fidelity_of(value) for name, value in self.knobs.items()]
        return max([*found, Fidelity.ROUNDING if self.made else Fidelity.BITWISE])


def rungs(source: str, device: torch.device, large: bool) -> tuple[list[LadderRow], dict[str, str]]:
    """The rungs of a source's ladder, and ours, that make sense on ``device``; and why other rungs are left out.

    Args:
        large: whether the model has convolutions whose weights a CPU may keep in order.
    """
    return _on_gpu(source, device) if device.type == "cuda" else _on_cpu(source, device, large)


def _on_cpu(source: str, device: torch.device, large: bool) -> tuple[list[LadderRow], dict[str, str]]:
    left = {"half precision": "this CPU has no instructions for 16 bits"} if not has_bfloat16() else {}
    half = [LadderRow("bfloat16", 2.63 if source == "B" else 2.46, {"precision": "bf16"})] if has_bfloat16() else []
    last: dict[str, Any] = {"channels_last": True}
    if source == "B":
        found = [
            LadderRow("original", 1.0),
            *half,
            LadderRow("channels last", 2.88, last),
            LadderRow("traced", 2.96, {**last, "traced": True}),
            LadderRow("traced, as kept", None, {**last, "traced": True}, "kept"),
        ]
        left["memory-efficient attention"] = "torch's attention on CPUs is of that kind from the first row on"
    else:
        found = [LadderRow("fp32", 1.0, inference=False), *half, LadderRow("inference mode", 2.49)]
        left["fused kernels"] = "they are Triton's, for GPUs; on a CPU torch.compile fuses the same"
    found.append(LadderRow("fused QKV products", None, {}, "fused"))
    if large:
        found.append(LadderRow("packed weights", None, {"packed_weights": True}))
    else:
        left["packed weights"] = "the model has no convolutions that are large enough"
    why = compiler.why_not(device)
    if why is None:
        found += [LadderRow(f"compiled, {way}, channels last", None, {"compile": way, **last}) for way in _WAYS]
        packs = {"compile": "regional", **last, "packed_weights": True}
        found += [LadderRow("compiled, regional, packed weights", None, packs)] if large else []
    else:
        left["compiled"] = why
    return found, left


_WAYS = ("regional", "whole")


def _on_gpu(source: str, device: torch.device) -> tuple[list[LadderRow], dict[str, str]]:
    half, last = {"precision": "fp16"}, {"precision": "fp16", "channels_last": True}
    fused = {**last, "fused_kernels": True}
    if source == "B":
        found = [
            LadderRow("original", 1.0),
            LadderRow("half precision", 2.63, half),
            LadderRow("channels last", 2.88, last),
            LadderRow("traced", 2.96, {**last, "traced": True}),
            LadderRow("memory-efficient attention", 3.61, {**last, "attention": "efficient"}),
        ]
    else:
        found = [
            LadderRow("fp32", 1.0, inference=False),
            LadderRow("half precision", 2.46, half, inference=False),
            LadderRow("inference mode", 2.49, half),
            LadderRow("fused kernels", 4.20, fused),
        ]
    found.append(LadderRow("fused QKV products", None, last, "fused"))
    found.append(LadderRow("fused kernels, ours", None, fused))
    found.append(LadderRow("recorded as CUDA graphs", None, {**last, "cuda_graphs": True}))
    found += [LadderRow(f"compiled, {way}", None, {"compile": way, **last}) for way in _WAYS]
    found.append(LadderRow("compiled, regional, recorded", None, {"compile": "regional", "cuda_graphs": True, **last}))
    lacking = {"fused_kernels": triton.why_not(device), "compile": compiler.why_not(device)}
    lacking["cuda_graphs"] = "a recording is of NVIDIA's runtime" if torch.version.hip else None
    left = {knobs()[name].label.lower(): why for name, why in lacking.items() if why is not None}
    found = [rung for rung in found if not any(lacking.get(name) for name in rung.knobs)]
    return found, {**left, "packed weights": "they are kept in the order of a CPU's kernels"}


def has_bfloat16() -> bool:
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return bool(supported())


def run(
    source: str, *, model: str = "sd15", size: int | None = None, pairs: int = 5, out: Path | None = None
) -> dict[str, Any]:
    """Measure every rung next to diffusers' own eager UNet in float32.

    Args:
        model: "sd15", with random weights, or "demo".
        size: of the picture in pixels; None: 512 on a GPU, 256 on a CPU.
    """
    device = default_device()
    size = size or (512 if device.type == "cuda" else 256)
    pipe = demo_pipeline() if model == "demo" else random_denoiser(model, torch.device("cpu"))
    unet = pipe.unet.float().to(device).eval()
    given = inputs(unet, size, device)
    found, left_out = rungs(source, device, bool(packable(anatomy_of(unet))))
    rows, plain = [], copy.deepcopy(unet)
    with new_machine():
        for rung in progress.report_each("rungs", found):
            rows.append(_row(rung, plain, unet, given, pairs, device))
    shared = {"source": source, "size": size, "pairs": pairs, "rows": rows, "left_out": left_out}
    report = facts(None if model == "demo" else model, **shared)
    return written(report, lines, out)


@contextlib.contextmanager
def new_machine() -> Iterator[None]:
    """Hide earlier compiled code and traces within the block, so that first calls are those of a new machine."""
    named = os.environ.get("SD_LOWVRAM_CACHE")
    with tempfile.TemporaryDirectory(prefix="sd-lowvram-ladder-") as folder:
        os.environ["SD_LOWVRAM_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("SD_LOWVRAM_CACHE")
            os.environ.update({} if named is None else {"SD_LOWVRAM_CACHE": named})


def inputs(unet: Any, size: int, device: torch.device) -> _CALLED:
    noise = torch.Generator().manual_seed(0)
    side, width = size // 8, unet.config.cross_attention_dim
    sample, context = torch.randn(2, 4, side, side, generator=noise), torch.randn(2, 77, width, generator=noise)
    return sample.to(device), torch.tensor(500, device=device), context.to(device)


def _row(
    rung: LadderRow, plain: nn.Module, unet: nn.Module, given: _CALLED, pairs: int, device: torch.device
) -> dict[str, Any]:
    mode = torch.inference_mode if rung.inference else torch.no_grad
    with mode(), attached(unet, Settings(**rung.knobs), device=device), _made(rung, unet, given) as ours:
        first = functools.partial(step, plain, given)
        if rung.knobs.keys() & _SECOND and rung.made != "kept":
            ours()
        measured = compare(first, ours, pairs, device)
    return {"name": rung.name, **measured, "fidelity": str(rung.fidelity), "published": rung.published}


def step(unet: Any, given: _CALLED) -> Tensor:
    predicted: Tensor = unet(*given, return_dict=False)[0]
    return predicted


@contextlib.contextmanager
def _made(rung: LadderRow, unet: Any, given: _CALLED) -> Iterator[Callable[[], Tensor]]:
    """A call of ``unet`` as ``rung`` has it."""
    if rung.made == "fused":
        unet.fuse_qkv_projections()
        try:
            yield functools.partial(step, unet, given)
        finally:
            unet.unfuse_qkv_projections()
    else:
        yield functools.partial(step, unet, given)


_SHEET = Sheet(
    "The ladder of source {source}, here",
    "A guided step of {model} at {size}x{size} on {device} with {threads} threads (torch {torch}); every row in turn "
    "with diffusers' own UNet in float32, medians of {pairs} pairs in one process. Published: {published}, for whole "
    "pictures. *error*: relative, to the first row.",
    (
        ("row", "{name}"),
        *pair_columns("diffusers' own, s", "this, s"),
        ("published", lambda row: "" if row["published"] is None else f"{row['published']:.2f}"),
        ("fidelity", "{fidelity}"),
        ("error", "{error:.0e}"),
        ("first call, seconds more", "{warm_up_seconds:.1f}"),
    ),
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The ladder as Markdown."""
    return _SHEET.lines({**report, "published": SOURCES[report["source"]]})
