"""Measured points, each series with the curve that was fitted to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd_lowvram.plots.style import TEXT, new_figure

from .style import SERIES, plain_axes

_POINTS = 60


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes:
        curve: the fitted one; None: points alone.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    curve: Callable[[float], float] | None = None


def curves(title: str, series: Mapping[str, Series], x: str, y: str, *, equal: bool = False) -> Any:
    """A matplotlib Figure of ``series`` by name.

    Args:
        x, y: quantities and units.
        equal: whether a line shows where both are the same, and both axes are logarithmic.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    figure = new_figure(8.2, 4.6)
    axes = plain_axes(figure, title, x, y)
    for number, (label, one) in enumerate(series.items()):
        colour = SERIES[number % len(SERIES)]
        axes.plot(one.xs, one.ys, linestyle="none", marker="o", markersize=4, alpha=0.75, color=colour, label=label)
        if one.curve is not None:
            low, high = min(one.xs), max(one.xs)
            along = [low + (high - low) * place / _POINTS for place in range(_POINTS + 1)]
            axes.plot(along, list(map(one.curve, along)), color=colour, linewidth=1.4)
    if equal:
        values = [value for one in series.values() for value in (*one.xs, *one.ys)]
        ends = [min(values), max(values)]
        axes.plot(ends, ends, color=TEXT, linewidth=1, linestyle="--", label="the same")
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            _plain_numbers(axis)
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor=TEXT, fontsize=9)
    return figure


def _plain_numbers(axis: Any) -> None:
    """Name 1, 2 and 5 of each power of ten as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
