"""Gradio components from the arguments; a knob that is added to the settings appears here by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from sd_lowvram.knob import GROUPS

from .arguments import IN_SIGHT, TITLE, Argument, arguments

_HEADINGS = dict(
    zip(GROUPS, ("The whole run", "Steps", "Faster, with another picture", "Decoding and encoding"), strict=True)
)


def build(
    accordion: Callable[..., Any], tab: str, values: Mapping[str, Any], without: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], Any, Any]:
    """Draw the panel.

    Args:
        accordion: the host's InputAccordion: a checkbox that is an accordion too, with space for text in its title bar.
        tab: "txt2img" or "img2img", for the elements' ids.
        values: what the controls show at first, by name.
        without: arguments that stay out of sight, as they have no effect in this host.

    Returns:
        the controls by name in the order of the positional list, the line for the prediction, and the head's.
    """
    by_name = {argument.name: argument for argument in arguments()}
    components: dict[str, Any] = {}

    def row(names: Sequence[str], info: bool, visible: bool = True) -> None:
        with gr.Row(visible=visible):
            for name in names:
                components[name] = _component(by_name[name], f"{tab}_sd_lowvram_{name}", values[name], info, visible)

    def rows(names: Sequence[str]) -> None:
        for start in range(0, len(names), 3):
            row(names[start : start + 3], info=True)

    with accordion(value=values["enabled"], label=TITLE, elem_id=f"{tab}_sd_lowvram_enabled") as enabled:
        components["enabled"] = enabled
        with enabled.extra():
            head = gr.HTML(value="", elem_id=f"{tab}_sd_lowvram_verdict")
        line = gr.HTML(value="", elem_id=f"{tab}_sd_lowvram_prediction")
        row(IN_SIGHT, info=False)
        with gr.Accordion("Advanced", open=False):
            rest = [argument for name, argument in by_name.items() if name not in components]
            for group, heading in _HEADINGS.items():
                with gr.Accordion(heading, open=False):
                    rows([one.name for one in rest if one.group == group and one.name not in without])
            row([one.name for one in rest if one.name in without], info=True, visible=False)
    for component in components.values():
        component.do_not_save_to_config = True  # the settings section keeps the defaults
    return {name: components[name] for name in by_name}, line, head


def _component(argument: Argument, elem_id: str, value: Any, info: bool, visible: bool) -> Any:
    common = {"label": argument.label, "value": value, "elem_id": elem_id, "visible": visible}
    placed_info = {"info": argument.help} if info else {}
    if argument.kind == "switch":
        return gr.Checkbox(**common)
    if argument.kind == "size":
        return gr.Textbox(placeholder="" if info else argument.example, max_lines=1, **placed_info, **common)
    if argument.kind == "number":
        return gr.Number(precision=0, **placed_info, **common)
    return gr.Dropdown(choices=list(argument.choices), **placed_info, **common)
