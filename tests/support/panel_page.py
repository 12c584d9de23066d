"""Builds the panel with the gradio of this Python and prints what came of it; run by test_panel_gradio.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gradio as gr

sys.path.insert(0, str(Path(__file__).parents[2]))

from webui_ext import controls
from webui_ext.arguments import arguments

HEADINGS = {"The whole run", "Decoding and encoding"}


def accordion(value: bool, label: str, elem_id: str) -> Any:
    """As the host's: a checkbox that is used as a context."""
    box = gr.Checkbox(value, label=label, elem_id=f"{elem_id}-checkbox", visible=False)
    frame = gr.Accordion(label, open=value, elem_id=elem_id)
    type(box).__enter__ = lambda self: (frame.__enter__(), self)[1]  # type: ignore[attr-defined]
    type(box).__exit__ = lambda self, *error: frame.__exit__(*error)  # type: ignore[attr-defined]
    type(box).extra = lambda self: gr.Column(elem_id=f"{elem_id}-extra")  # type: ignore[attr-defined]
    return box


def fold_of(component: Any) -> Any:
    """The innermost accordion around a component."""
    while not isinstance(component := component.parent, gr.Accordion):
        pass
    return component


def main() -> None:
    values = {one.name: one.default for one in arguments()}
    found = {}
    with gr.Blocks() as page:
        for tab in ("txt2img", "img2img"):
            without = frozenset({"offload", "weights_mib"} if tab == "img2img" else ())
            made, line, head = controls.build(accordion, tab, values, without)
            assert {name for name, one in made.items() if not one.visible} - {"enabled"} == without
            assert {fold_of(made[name]).label for name in ("ram", "vae_tiles")} == HEADINGS
            assert type(line) is type(head) is gr.HTML and head.parent.elem_id.endswith("-extra")
            assert all(one.do_not_save_to_config for one in made.values())
            assert made["vram"].placeholder and made["ram"].info and not made["ram"].placeholder
            found[tab] = {name: [type(one).__name__, one.value, one.elem_id] for name, one in made.items()}
    page.get_config_file()  # as the page asks for it
    print(json.dumps({"gradio": gr.__version__, "found": found}))


if __name__ == "__main__":
    main()
