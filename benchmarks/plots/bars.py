"""Bars side by side: for each name one of every series, with its value at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sd_lowvram.plots.style import TEXT, new_figure

from .style import SERIES, plain_axes


def bars(title: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]], what: str) -> Any:
    """A matplotlib Figure; names go down, and a value that is None has no bar.

    Args:
        what: the values' quantity and unit.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    figure = new_figure(8.2, 1.3 + 0.24 * len(names) * (len(series) + 0.6))
    axes = plain_axes(figure, title, what)
    thick = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        places = [place + number * thick for place in range(len(names))]
        lengths = [value or 0.0 for value in values]
        drawn = axes.barh(places, lengths, height=0.92 * thick, color=SERIES[number % len(SERIES)], label=label)
        axes.bar_label(
            drawn,
            ["" if one is None else f"{one:.0f}" if abs(one) >= 1000 else f"{one:.3g}" for one in values],
            padding=3,
            color=TEXT,
            fontsize=8,
        )
    middle = 0.8 / 2 - thick / 2
    axes.set_yticks([place + middle for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if len(series) > 1:
        axes.legend(frameon=False, labelcolor=TEXT, fontsize=9)
    return figure
