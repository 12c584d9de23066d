"""Common parts of all charts: colours, the check for matplotlib, and the conversion of a figure to bytes."""

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
