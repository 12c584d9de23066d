"""``smaller-unets``: what cuts and combinations of a UNet save, counted, and how fast a pass is here.

The published figures are those of A-SDM (2023) for SD1.5; its time is that of a phone.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.devices.pairs import compared
from sd_lowvram.units import format_size

from .tables import Row, Sheet, pair_columns, written

PUBLISHED_PARAMETERS = {"Base": "0.58", "Small": "0.49", "Tiny": "0.33"}
"""Billions."""
PUBLISHED_TIMES = {"M2": "1.22"}
"""Times as fast as the whole UNet."""

STUDENTS: dict[str, tuple[str, int]] = {
    "Base": ("base", 0),
    "Small": ("small", 0),
    "Tiny": ("tiny", 0),
    "M1": ("base", 1),
    "M2": ("base", 2),
    "M3": ("base", 3),
}
"""The cut, and how many outermost blocks of it the whole UNet gets; 0: the cut alone."""

_COUNTED_AT = 256


def full_size_unet() -> Any:
    """SD1.5's UNet in float32 with random weights."""
    from sd_lowvram.checkpoints.architectures import architecture, build_components

    return build_components(architecture("sd15"), torch.float32, "cpu", only=("unet",))["unet"]


def run(
    out: Path | None = None,
    side: int = 512,
    pairs: int = 5,
    students: Sequence[str] = tuple(STUDENTS),
    unet: Callable[[], Any] = full_size_unet,
) -> dict[str, Any]:
    """Measure passes for a picture of ``side`` pixels on the CPU; with ``out`` written as Markdown, and as JSON beside
    it.

    Args:
        students: of :data:`STUDENTS`.
        unet: makes the whole UNet.
    """
    from sd_lowvram.unets.analysis import counted

    whole = unet()
    rows = [{"name": "whole", **counted(whole, _COUNTED_AT)}]
    for number, name in enumerate(students):
        rows.append(_row(whole, name, side, pairs))
        progress.report("UNets", number + 1, len(students))
    report = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "side": side,
        "pairs": pairs,
        "rows": rows,
    }
    return written(report, lines, out)


def _row(whole: Any, name: str, side: int, pairs: int) -> dict[str, Any]:
    from sd_lowvram.unets.analysis import counted

    student = made(whole, name)
    call = _given(whole.config, side)
    with torch.inference_mode():
        times = compared(functools.partial(call, whole), functools.partial(call, student), pairs, torch.device("cpu"))
    row = {
        "name": name,
        **counted(student, _COUNTED_AT),
        **{one: value for one, value in times.items() if one not in ("error", "warm_up_seconds")},
    }
    del student
    gc.collect()
    return row


def made(whole: Any, name: str) -> Any:
    """The smaller UNet of that name, with the weights that it inherits."""
    from sd_lowvram.unets.combine import combined
    from sd_lowvram.unets.prune import cut_of_kind, pruned

    kind, blocks = STUDENTS[name]
    cut = pruned(whole, cut_of_kind(whole.config, kind))
    return combined(cut, whole, blocks) if blocks else cut


def _given(config: Any, side: int) -> Callable[[Any], torch.Tensor]:
    """Inputs of a pass without guidance."""
    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(1, config["in_channels"], side // 8, side // 8, generator=noise)
    text = torch.randn(1, 77, config["cross_attention_dim"], generator=noise)
    return lambda unet: unet(latents, 500, text, return_dict=False)[0]


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Result of :func:`run` as Markdown."""
    whole = report["rows"][0]["operations"]
    return _SHEET.lines({**report, "rows": [{**row, "share": row["operations"] / whole} for row in report["rows"]]})


def _timed(cell: Any) -> Callable[[Row], str]:
    return lambda row: cell(row) if "ratio" in row else "-"


_SHEET = Sheet(
    "Smaller UNets: what they save",
    "SD1.5's UNet in float32 with random weights, as `unet prune` and `unet combine` cut it. Operations and "
    f"activations of a guided step at {_COUNTED_AT}x{_COUNTED_AT}, counted; seconds of a pass at "
    "{side}x{side} on this CPU, {threads} threads, torch {torch}, beside the whole UNet's in turn, medians of {pairs} "
    "pairs. Published: A-SDM 2023, the times on a phone.",
    (
        ("UNet", "{name}"),
        ("parameters", lambda row: f"{row['parameters'] / 1e6:.1f} M"),
        (
            "published",
            lambda row: f"{PUBLISHED_PARAMETERS[row['name']]} B" if row["name"] in PUBLISHED_PARAMETERS else "-",
        ),
        ("operations", "{share:.3f}"),
        ("activations", lambda row: format_size(row["peak_bytes"])),
        *((head, _timed(cell)) for head, cell in pair_columns("whole, s", "smaller, s", "{:.2f}")),
        ("published", lambda row: PUBLISHED_TIMES.get(row["name"], "-")),
    ),
)
