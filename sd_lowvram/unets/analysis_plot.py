"""A picture of what each unit of a UNet takes: share of the time and of the weights, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..plots.style import ACTIVATIONS, MEASURED, TEXT, WEIGHTS, as_png, new_figure

if TYPE_CHECKING:
    from .analysis import Taken


def analysis_png(taken: Sequence[Taken], title: str, how: str) -> bytes:
    """Bars for every unit in the order of the run, as the bytes of a PNG file.

    Args:
        how: origin of the times, "measured" or "predicted".

    Raises:
        BadInputError: matplotlib is not installed.
    """
    names = [unit.name for unit in taken]
    figure = new_figure(max(8.0, 0.3 * len(names)), 6.0)
    rows = figure.subplots(3, 1, sharex=True)
    times, weights = sum(unit.seconds for unit in taken), sum(unit.parameters for unit in taken)
    series = (
        (f"time, % ({how})", [100 * unit.seconds / times for unit in taken], MEASURED),
        ("parameters, %", [100 * unit.parameters / weights for unit in taken], WEIGHTS),
        ("activations, MiB", [unit.peak_bytes / 2**20 for unit in taken], ACTIVATIONS),
    )
    for axes, (label, values, colour) in zip(rows, series, strict=True):
        axes.bar(range(len(values)), values, color=colour, width=0.8)
        axes.set_ylabel(label, color=TEXT, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=TEXT, labelsize=8)
    rows[0].set_title(f"{title}: {1000 * times:.0f} ms a guided step, {weights / 1e6:.1f} M parameters", color=TEXT)
    rows[-1].set_xticks(range(len(names)), names, rotation=90)
    return as_png(figure)
