"""A number for each height and width, grey where there is none: the darker the larger, or of ratios the darker the
farther from 1, red above and blue below."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from sd_lowvram.plots.style import TEXT, new_figure


def heat_map(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    what: str = "seconds of a picture",
    *,
    ratios: bool = False,
) -> Any:
    """A matplotlib Figure of ``values`` by height and width, above 0 or None.

    Args:
        ratios: whether 1 is the middle of the scale.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    heights, widths = (sorted({size[side] for size in values}) for side in (0, 1))
    grid = [[math.log(values.get((height, width)) or math.nan) for width in widths] for height in heights]
    figure = new_figure(max(7.0, 2 + 0.62 * len(widths)), 1.6 + 0.5 * len(heights))
    from matplotlib import colormaps

    axes = figure.add_subplot()
    colours = colormaps["RdBu_r" if ratios else "Blues"].with_extremes(bad="#c8c8c8")
    known = [math.log(value) for value in values.values() if value]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if ratios:
        high = max(-low, high)
        low = -high
    axes.imshow(grid, cmap=colours, aspect="auto", vmin=low, vmax=high)
    dark = 0.6 * high if ratios else low + 0.6 * (high - low)
    for (row, height), (column, width) in itertools.product(enumerate(heights), enumerate(widths)):
        value = values.get((height, width))
        if value:
            far = abs(math.log(value)) if ratios else math.log(value)
            shade = "#fefefe" if far > dark else "#101214"
            digits = 2 if value < 10 else 1 if value < 100 else 0
            axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=8, color=shade)
    axes.tick_params(colors=TEXT)
    axes.set_xticks(range(len(widths)), list(map(str, widths)))
    axes.set_yticks(range(len(heights)), list(map(str, heights)))
    axes.set_xlabel("width", color=TEXT)
    axes.set_ylabel("height", color=TEXT)
    axes.set_title(f"{what}: {title}", color=TEXT, fontsize=10)
    return figure
