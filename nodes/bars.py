"""The memory of each stage as bars, drawn with what every host has; for where matplotlib is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sd_lowvram.plots.style import ACTIVATIONS, BUDGET, HOST, MEASURED, TEXT, WEIGHTS
from ..sd_lowvram.units import format_size

_LEFT, _RIGHT, _ROW, _BAR = 70, 450, 44, 20
"""Pixels. The picture is as wide as the node that shows it, which would make the words of a wider one too small."""


def memory_bars(plan: Any, measured: Mapping[str, int]) -> Any:
    """A PIL picture: weights and activations of every stage, what was measured as a mark, and the budget as a line.

    Args:
        plan: a Plan. On a CPU host memory is drawn after the activations, as its allocator counts both.
        measured: peak bytes by the stage's name, of those that have run.
    """
    from PIL import Image, ImageDraw

    request, both = plan.request, plan.request.device.type == "cpu"
    parts = {stage.name: _parts(stage, both) for stage in plan.stages}
    planned = {stage.name: stage.held_bytes if both else stage.peak_bytes for stage in plan.stages}
    longest = max(request.vram, *measured.values(), *(sum(size for size, _ in row) for row in parts.values()))
    scale = (_RIGHT - _LEFT) / longest
    picture = Image.new("RGB", (_RIGHT + 30, _ROW * (len(parts) + 2)), "white")
    draw = ImageDraw.Draw(picture)
    for place, (name, row) in enumerate(parts.items(), 1):
        top, x = place * _ROW, float(_LEFT)
        draw.text((12, top + 4), name, fill=TEXT)
        for size, colour in row:
            draw.rectangle((x, top, x + size * scale, top + _BAR), fill=colour)
            x += size * scale
        caption = f"{format_size(planned[name])} planned"
        if name in measured:
            mark = _LEFT + measured[name] * scale
            draw.line((mark, top - 4, mark, top + _BAR + 4), fill=MEASURED, width=3)
            caption += f", {format_size(measured[name])} measured"
        draw.text((_LEFT, top + _BAR + 5), caption, fill=TEXT)
    budget = _LEFT + request.vram * scale
    draw.line((budget, _ROW - 10, budget, _ROW * (len(parts) + 1) - 4), fill=BUDGET, width=2)
    draw.text((12, 12), f"{request.width}x{request.height}, batch {request.batch}", fill=TEXT)
    _legend(draw, picture.height - 26, [(WEIGHTS, "weights"), (ACTIVATIONS, "activations")]
            + [(HOST, "host memory")] * both + [(MEASURED, "measured")] * bool(measured)
            + [(BUDGET, f"budget {format_size(request.vram)}")])  # fmt: skip
    return picture


def _parts(stage: Any, both: bool) -> list[tuple[int, str]]:
    weights = min(stage.weights_bytes, stage.peak_bytes)
    parts = [(weights, WEIGHTS), (stage.peak_bytes - weights, ACTIVATIONS)]
    return [*parts, (stage.host_bytes, HOST)] if both else parts


def _legend(draw: Any, top: int, entries: list[tuple[str, str]]) -> None:
    x = 12.0
    for colour, name in entries:
        draw.rectangle((x, top + 1, x + 12, top + 11), fill=colour)
        draw.text((x + 18, top), name, fill=TEXT)
        x += 42 + draw.textlength(name)
