"""Streamed and parked runs under `torch.cuda._sanitizer`, which finds what streams touch in no order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.files import table
from sd_lowvram.units import MIB
from sd_lowvram.weights import weight_bytes

from ..models import PLENTY, embeddings, random_denoiser, random_pipeline
from .record import Case, ResultRows

MODEL, SIDE = "sd15", 512
WAYS = {"a tenth of the UNet, streamed": "streamed", "the least of all memory, a whole picture": "smallest"}


def run(device: torch.device, record: ResultRows) -> None:
    """Add a row for each way: equal bits in two runs, and to resident weights if only weights move."""
    for name, way in progress.report_each("correctness", WAYS.items()):
        record.fill([{"what": name, "way": way}], trial_correctness, device=str(device), model=MODEL, side=SIDE)


def trial_correctness(device: str, model: str, side: int, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Each of ``cases``; where something is touched in no order, its row has ``races`` and the first one's report."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    where = torch.device(device)
    for case in cases:
        try:
            yield (_streamed if case["way"] == "streamed" else _smallest)(model, where, side) | {"races": 0}
        except CUDASanitizerErrors as found:
            yield {"races": len(found.errors), "report": str(found.errors[0])}
            return


def _watch(device: torch.device) -> None:
    """Make unordered accesses raise from now on."""
    if device.type == "cuda":
        from torch.cuda import _sanitizer

        _sanitizer.enable_cuda_sanitizer()


def _streamed(model: str, device: torch.device, side: int) -> dict[str, Any]:
    from sd_lowvram import Settings, optimize

    pipe = random_denoiser(model, device)
    given: dict[str, Any] = {**embeddings(pipe, device), "output_type": "latent"}
    tenth = max(1, weight_bytes(pipe.unet) // 10 // MIB)

    def prepare(**settings: Any) -> None:
        fixed = Settings(deterministic=True, **settings)
        optimize(pipe, vram=PLENTY, width=side, height=side, device=device, settings=fixed)

    prepare(offload="none")
    resident = _paint(pipe, side, **given)
    prepare(offload="blocks", weights_mib=tenth)
    _watch(device)
    start = time.perf_counter()
    streamed = [_paint(pipe, side, **given) for _ in range(2)]
    same = all(torch.equal(one, resident) for one in streamed)
    return {"same_bits": same, "finite": bool(resident.isfinite().all()), "seconds": time.perf_counter() - start}


def _smallest(model: str, device: torch.device, side: int) -> dict[str, Any]:
    from sd_lowvram import Settings, optimize

    pipe = random_pipeline(model, device)
    least = Settings.smallest().filled(deterministic=True)
    optimize(pipe, vram=PLENTY, width=side, height=side, device=device, settings=least)
    unwatched = _paint(pipe, side, steps=1, prompt="a red apple", output_type="pt")
    _watch(device)
    start = time.perf_counter()
    same = torch.equal(_paint(pipe, side, steps=1, prompt="a red apple", output_type="pt"), unwatched)
    return {"same_bits": same, "finite": bool(unwatched.isfinite().all()), "seconds": time.perf_counter() - start}


def _paint(pipe: Any, side: int, steps: int = 2, **given: Any) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    images = pipe(**given, width=side, height=side, num_inference_steps=steps, generator=noise).images
    return images.cpu()  # type: ignore[no-any-return]


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Summary for a reader."""
    ran = [row for row in rows if "races" in row]
    if ran:
        races = sum(row["races"] for row in ran)
        same = sum(not row["races"] and row["same_bits"] and row["finite"] for row in ran)
        yield f"**{races} unordered accesses**" if races else "no unordered access"
        yield f"same bits in {same} of {len(ran)}"


def lines(part: dict[str, Any]) -> Iterator[str]:
    """The part as Markdown."""
    yield "## Correctness"
    yield ""
    yield f"{MODEL} at {SIDE}x{SIDE} under `torch.cuda._sanitizer`, which raises where a stream touches what another"
    yield "may still be using. *Same bits*: of two runs, and where only weights move of resident ones too."
    yield ""
    yield from table(("run", "unordered accesses", "same bits", "finite", "s"), map(_cells, part["rows"]))


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["what"], f"**{row['error'].replace('|', '/')}**", "", "", ""]
    if row["races"]:
        return [row["what"], f"**{row['races']}**", "", "", ""]
    told = ["yes" if row[name] else "**no**" for name in ("same_bits", "finite")]
    return [row["what"], "none", *told, f"{row['seconds']:.1f}"]
