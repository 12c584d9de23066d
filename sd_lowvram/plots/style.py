"""What all charts share: colours, the one check for matplotlib, and how a figure becomes bytes."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from ..errors import BadInputError

WEIGHTS, ACTIVATIONS, HOST = "#33567f", "#8fb4d9", "#dcdfe4"
MEASURED, BUDGET, TEXT = "#d9701a", "#b3202c", "#2b2f36"


def check_plots() -> None:
    """Raise BadInputError where nothing can be drawn: matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInputError('a plot needs matplotlib: pip install "sd-lowvram[plots]"')


def new_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """An empty matplotlib Figure of so many inches, on white.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, facecolor="white", layout=layout)


def as_png(figure: Any) -> bytes:
    """``figure`` as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


SERIES = ("#33567f", "#d9701a", "#4d9078", "#a05195", "#8a6d3b", "#b3202c", "#5b8fd1", "#6b7280", "#c2a83e")
"""Colours of what is shown side by side; each can be read on white and on black."""

_THEMED = {TEXT: "var(--ink)", "#ffffff": "var(--paper)"}
"""Colours that a page decides when it is light or dark, and the names of its variables for them."""


def as_svg(figure: Any, name: str) -> str:
    """``figure`` as an element of a page, its text as text; the page's ``--ink`` and ``--paper`` are text and ground.

    Args:
        name: one of its own on the page, of letters, digits and dashes: references within the element begin with it.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _THEMED.items():
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
