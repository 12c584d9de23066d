"""A square of names against each other, a word in each cell and a shade for how far it is from nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sd_lowvram.plots.style import TEXT, new_figure


def grid(title: str, names: Sequence[str], cells: Mapping[tuple[str, str], tuple[str, float]]) -> Any:
    """A matplotlib Figure of ``cells``: by row and column what is written there, and its shade from 0 to 1.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    figure = new_figure(2.4 + 0.75 * len(names), 1.9 + 0.42 * len(names))
    from matplotlib import colormaps

    axes = figure.add_subplot()
    shades = [[cells[one, other][1] for other in names] for one in names]
    axes.imshow(shades, cmap=colormaps["Oranges"], vmin=0, vmax=1, aspect="auto")
    for (row, one), (column, other) in itertools.product(enumerate(names), enumerate(names)):
        word, shade = cells[one, other]
        axes.text(
            column, row, word, ha="center", va="center", fontsize=8, color="#101214" if shade < 0.7 else "#fefefe"
        )
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(colors=TEXT, length=0)
    axes.set_title(title, color=TEXT, fontsize=11, loc="left")
    return figure
