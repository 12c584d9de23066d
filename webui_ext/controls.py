"""Gradio components from the arguments; a knob that is added to the settings appears here by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from .arguments import IN_SIGHT, TITLE, Argument, arguments


def build(
    accordion: Callable[..., Any], tab: str, values: Mapping[str, Any], without: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], Any, Any]:
    """Draw the panel.

    Args:
        accordion: the host's InputAccordion: a checkbox that is an accordion too, with room in its head.
        tab: "txt2img" or "img2img", for the elements' ids.
        values: what the controls show at first, by name.
        without: arguments that stay out of sight, as the host sees to them itself.

    Returns:
        the controls by name in the order of the positional list, the line for the prediction, and the head's.
    """
    known = {argument.name: argument for argument in arguments()}
    made: dict[str, Any] = {}

    def row(names: Sequence[str], info: bool) -> None:
        with gr.Row():
            for name in names:
                made[name] = _component(
                    known[name], f"{tab}_sd_lowvram_{name}", values[name], info, name not in without
                )

    with accordion(value=values["enabled"], label=TITLE, elem_id=f"{tab}_sd_lowvram_enabled") as enabled:
        made["enabled"] = enabled
        with enabled.extra():
            head = gr.HTML(value="", elem_id=f"{tab}_sd_lowvram_verdict")
        line = gr.HTML(value="", elem_id=f"{tab}_sd_lowvram_prediction")
        row(IN_SIGHT, info=False)
        with gr.Accordion("Advanced", open=False):
            rest = [name for name in known if name not in made]
            for start in range(0, len(rest), 3):
                row(rest[start : start + 3], info=True)
    for component in made.values():
        component.do_not_save_to_config = True  # the settings section keeps the defaults
    return {name: made[name] for name in known}, line, head


def _component(argument: Argument, elem_id: str, value: Any, info: bool, visible: bool) -> Any:
    common = {"label": argument.label, "value": value, "elem_id": elem_id, "visible": visible}
    told = {"info": argument.help} if info else {}
    if argument.kind == "switch":
        return gr.Checkbox(**common)
    if argument.kind == "size":
        return gr.Textbox(placeholder="" if info else argument.help, max_lines=1, **told, **common)
    if argument.kind == "number":
        return gr.Number(precision=0, **told, **common)
    return gr.Dropdown(choices=list(argument.choices), **told, **common)
