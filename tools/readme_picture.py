"""Draws docs/too-large.png: memory over a run of SDXL that is too large for a card, and SD1.5's largest pictures.

    python tools/readme_picture.py --out docs/too-large.png

Both are predicted by plans; nothing runs. Sizes of other programs are the published ones in
benchmarks/largest_rtx2070.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.max_size import PUBLISHED
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.planning.timeline import timelines_of
from sd_lowvram.plots.style import ACTIVATIONS, BUDGET, MEASURED, TEXT, WEIGHTS, as_png, new_figure
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

LARGEST = Path(__file__).resolve().parents[1] / "benchmarks" / "largest_rtx2070.json"
CARD, SIDE, BUDGET_BYTES, STEPS = "rtx2070", 1024, 4 * GIB, 30
_SHOWN_STEPS = 6
"""Of a run's steps, which are all alike."""
_SAID: dict[str, Any] = {"textcoords": "offset points", "fontweight": "bold"}
_WIDTHS = {"text": 0.5, "denoise": 1.0, "decode": 3.0}


def course(settings: Settings, vram: int) -> tuple[Any, list[float], list[float]]:
    """The plan, and places along a run with the GiB that are held there, the libraries' share included."""
    anatomy = meta_anatomy("sdxl", torch.float16)
    request = request_for(
        anatomy, width=SIDE, height=SIDE, steps=STEPS, device="cuda", rates=profile(CARD), vram=vram, ram=32 * GIB
    )
    plan = make_plan(anatomy, request, settings)
    traced = {(one.name, one.component): one.device_bytes for one in timelines_of(anatomy, plan)}
    predicted = plan.predicted
    beside = predicted.reserved_bytes - predicted.peak_bytes + predicted.overhead_bytes
    places, heights, left = [], [], 0.0
    order = sorted(plan.stages, key=lambda stage: list(_WIDTHS).index(stage.name))
    for stage in [one for one in order for _ in range(_SHOWN_STEPS if one.name == "denoise" else 1)]:
        curve = traced.get((stage.name, stage.component), (stage.peak_bytes,))
        width = _WIDTHS[stage.name]
        places += [left + width * at / len(curve) for at in range(len(curve))]
        heights += [(value + beside) / GIB for value in curve]
        left += width
    return plan, [*places, left], [*heights, heights[-1]]


def draw_run(axes: Any) -> None:
    """Memory over a run: diffusers' as it loads the model, which the card cannot hold; ours within the budget."""
    rates = profile(CARD)
    card, budget = rates.vram_bytes / GIB, BUDGET_BYTES / GIB
    _, places, heights = course(Settings.policy("diffusers-default"), 64 * GIB)
    out = next(number for number, height in enumerate(heights) if height > card)
    _curve(
        axes,
        places[: out + 1],
        heights[: out + 1],
        f"plain diffusers: needs {max(heights):.1f} GiB",
        MEASURED,
    )
    axes.plot(places[out:], heights[out:], drawstyle="steps-post", color=MEASURED, linewidth=1.0, linestyle=":")
    axes.plot(places[out], card, marker="X", markersize=9, color=MEASURED, zorder=3)
    axes.annotate("runs out of memory here", (places[out], card), xytext=(-8, 6), ha="right", **_SAID, color=MEASURED)
    plan, places, heights = course(Settings(), BUDGET_BYTES)
    _curve(axes, places, heights, f"sd-lowvram: {max(heights):.1f} GiB, {plan.predicted.seconds:.0f} s", WEIGHTS, -15)
    for name, height, colour in (
        (f"{rates.title}, {card:g} GiB", card, TEXT),
        (f"budget {budget:g} GiB", budget, BUDGET),
    ):
        axes.axhline(height, color=colour, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.annotate(name, (0, height), xytext=(4, 4), **_SAID, color=colour)
    _label_run(axes, places[-1])


def _curve(axes: Any, places: list[float], heights: list[float], label: str, colour: str, above: int = 5) -> None:
    axes.fill_between(places, heights, step="post", color=colour, alpha=0.18, linewidth=0)
    axes.plot(places, heights, drawstyle="steps-post", color=colour, linewidth=1.4)
    first = max(heights[: len(heights) // 3])
    axes.annotate(label, (0.1, first), xytext=(2, above), **_SAID, color=colour)


def _label_run(axes: Any, right: float) -> None:
    steps = 1.0 + _SHOWN_STEPS * _WIDTHS["denoise"]
    axes.set_xticks(
        [0.5, (1.0 + steps) / 2, (steps + right) / 2], ["text", f"{STEPS} steps, {_SHOWN_STEPS} drawn", "decode"]
    )
    axes.set(xlim=(0, right), ylim=(0, None))
    axes.set_ylabel("VRAM, GiB")
    axes.set_title(f"SDXL, {SIDE}x{SIDE}, fp16: predicted memory over a run", loc="left", fontsize=11)


def draw_largest(axes: Any) -> None:
    """The largest square pictures of SD1.5 on 8 GB: published for other programs, predicted for ours."""
    rows = json.loads(LARGEST.read_text(encoding="utf-8"))
    others = sorted(((name, side) for name, (side, _) in PUBLISHED.items()), key=lambda item: item[1])
    ours = next(row["side"] for row in rows["rows"] if row["policy"] == "ours")
    names = [*(f"{name}, published" for name, _ in others), "sd-lowvram, predicted"]
    sides = [*(side for _, side in others), ours]
    bars = axes.barh(names, sides, color=[*[ACTIVATIONS] * len(others), WEIGHTS])
    axes.bar_label(bars, [f"{side}x{side}" for side in sides], padding=4, color=TEXT)
    axes.set(xlim=(0, 1.25 * max(sides)), xticks=[])
    axes.set_title("SD1.5 on an RTX 2070, 8 GB: largest picture", loc="left", fontsize=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/too-large.png"))
    out = parser.parse_args().out
    figure = new_figure(11, 3.7)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    draw_run(left)
    draw_largest(right)
    for axes in (left, right):
        axes.tick_params(colors=TEXT, length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    out.write_bytes(as_png(figure))


if __name__ == "__main__":
    main()
