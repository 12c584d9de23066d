"""Axes for the X/Y/Z grid, one for each argument but the switch: using one turns the panel on for its pictures.

What we refuse of a grid's pictures is a drawing of the reason in its place, where the host would leave it blank.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any

from modules import scripts

from sd_lowvram.errors import BadInputError

from .arguments import TITLE, Argument, arguments
from .refusal import Refused

OVERRIDES = "sd_lowvram_axes"
"""The attribute of a generation under which the axes leave their values."""


def add_axes() -> None:
    """Append our axes to the grid script's, and have it draw our reasons, once."""
    modules = [data.module for data in scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py"]
    for module in modules[:1]:
        present = {option.label for option in module.axis_options}
        wanted = [argument for argument in arguments() if argument.name != "enabled"]
        module.axis_options.extend(_axis(module, argument) for argument in wanted if _label(argument) not in present)
        if getattr(module.process_images, "func", None) is not _result_or_reason:
            module.process_images = functools.partial(_result_or_reason, module.process_images, module.Processed)


def _label(argument: Argument) -> str:
    return f"[{TITLE}] {argument.label}"


def _axis(module: Any, argument: Argument) -> Any:
    more: dict[str, Any] = {"confirm": _confirm(argument)}
    if argument.kind == "choice":
        more["choices"] = lambda: list(argument.choices)
    of_type = int if argument.kind == "number" else str
    return module.AxisOption(_label(argument), of_type, _apply(argument), **more)


def _apply(argument: Argument) -> Callable[[Any, Any, Any], None]:
    def apply(p: Any, value: Any, values: Any) -> None:
        # a grid copies its generation shallowly for every cell, so the cells must not share one dictionary
        setattr(p, OVERRIDES, {**getattr(p, OVERRIDES, {}), "enabled": True, argument.name: value})

    return apply


def _confirm(argument: Argument) -> Callable[[Any, Any], None]:
    def confirm(p: Any, values: Any) -> None:
        for value in values:
            try:
                argument.check(value)
            except BadInputError as error:
                raise RuntimeError(str(error)) from None

    return confirm


def _result_or_reason(make: Callable[[Any], Any], processed: Callable[..., Any], p: Any) -> Any:
    """Result of the host for ``p``, or our reason for refusing it."""
    try:
        return make(p)
    except Refused as refused:
        reason = str(refused)
        return processed(p, [_text_picture(reason, p.width, p.height)], p.seed, reason, infotexts=[reason])


def _text_picture(text: str, width: int, height: int) -> Any:
    """``text`` on a picture of this size, in letters that let all of it stand there."""
    from modules.images import get_font
    from PIL import Image, ImageDraw

    letters = max(6, min(32, int((width * height / len(text)) ** 0.5)))
    lines = textwrap.wrap(text, max(1, int(width / letters / 0.6)))
    picture = Image.new("RGB", (width, height), "white")
    font = get_font(letters)
    ImageDraw.Draw(picture).multiline_text((letters / 2, letters / 2), "\n".join(lines), "#c00", font)
    return picture
