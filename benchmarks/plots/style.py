"""Further common parts of charts of measurements: colours of series, axes, and a figure as a part of a page."""

from __future__ import annotations

import io
from typing import Any

from sd_lowvram.plots.style import TEXT

SERIES = ("#33567f", "#d9701a", "#4d9078", "#a05195", "#8a6d3b", "#b3202c", "#5b8fd1", "#6b7280", "#a98f2a")
"""Colours of what is shown side by side; on a dark page two have others, that they can be read."""

THEMED = {TEXT: "var(--ink)", "#ffffff": "var(--paper)", SERIES[0]: "var(--first)", SERIES[5]: "var(--sixth)"}
"""Colours that a page decides when it is light or dark, and the names of its variables for them."""


def as_svg(figure: Any, name: str) -> str:
    """``figure`` as an element of a page, its text as text; its colours of :data:`THEMED` are the page's.

    Args:
        name: one of its own on the page, of letters, digits and dashes: references within the element begin with it.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in THEMED.items():
        text = text.replace(colour, variable)
    return text


def plain_axes(figure: Any, title: str, x: str = "", y: str = "") -> Any:
    """Axes with a title and labels and without a frame above and beside."""
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.set_title(title, color=TEXT, fontsize=11, loc="left")
    axes.set_xlabel(x, color=TEXT)
    axes.set_ylabel(y, color=TEXT)
    axes.tick_params(colors=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(TEXT)
    return axes
