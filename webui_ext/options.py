"""The settings section: what the panel shows at first, and what API calls leave out."""

from __future__ import annotations

from typing import Any

import gradio as gr
from modules import shared

from sd_lowvram.errors import BadInputError

from .arguments import TITLE, arguments

_PREFIX = "sd_lowvram_"


def add_options() -> None:
    """Add a setting for each argument."""
    section = ("sd_lowvram", TITLE)
    for one in arguments():
        component: Any = gr.Textbox
        details: dict[str, Any] = {}
        if one.kind == "switch":
            component = gr.Checkbox
        elif one.kind == "choice":
            component, details = gr.Dropdown, {"choices": list(one.choices)}
        elif one.kind == "number":
            component, details = gr.Number, {"precision": 0}
        info = shared.OptionInfo(one.default, f"Default of {one.label}", component, details, section=section)
        shared.opts.add_option(_PREFIX + one.name, info.info(one.help).needs_reload_ui())


def defaults() -> dict[str, Any]:
    """The arguments by name as the settings have them; one that is no longer valid counts as not set."""
    values = {}
    for one in arguments():
        try:
            values[one.name] = one.check(shared.opts.data.get(_PREFIX + one.name, one.default))
        except BadInputError:
            values[one.name] = one.default
    return values
