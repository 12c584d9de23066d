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
    for argument in arguments():
        component: Any = gr.Textbox
        details: dict[str, Any] = {}
        if argument.kind == "switch":
            component = gr.Checkbox
        elif argument.kind == "choice":
            component, details = gr.Dropdown, {"choices": list(argument.choices)}
        elif argument.kind == "number":
            component, details = gr.Number, {"precision": 0}
        info = shared.OptionInfo(argument.default, f"Default of {argument.label}", component, details, section=section)
        shared.opts.add_option(_PREFIX + argument.name, info.info(argument.help).needs_reload_ui())


def defaults() -> dict[str, Any]:
    """The arguments by name as the settings have them; one that is no longer valid counts as not set."""
    values = {}
    for argument in arguments():
        try:
            values[argument.name] = argument.check(shared.opts.data.get(_PREFIX + argument.name, argument.default))
        except BadInputError:
            values[argument.name] = argument.default
    return values
