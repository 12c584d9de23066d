"""The prediction in the panel: follows the host's size controls and ours."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from sd_lowvram.errors import LowVRAMError

from . import checkpoint_preview as blueprint
from . import estimate, host, run
from .arguments import TITLE, read

_SIZES = ("width", "height", "batch_size", "steps", "cfg_scale")
_HIRES = ("hr", "hr_scale", "hr_resize_x", "hr_resize_y")


class Line:
    """Gathers the controls of one tab while the page is built, in whatever order they come, and connects them."""

    def __init__(self, tab: str) -> None:
        self.tab = tab
        self.names = (*_SIZES, *_HIRES) if tab == "txt2img" else _SIZES
        self.theirs: dict[str, Any] = {}
        self.ours: tuple[list[Any], Any] | None = None
        self.connected = False

    def offer(self, component: Any, elem_id: str | None) -> None:
        """A control of the host has been made."""
        # a checkbox that folds something names itself after the accordion, which is offered too
        name = (elem_id or "").removeprefix(f"{self.tab}_").removesuffix("-checkbox")
        if elem_id and elem_id.startswith(self.tab) and name in self.names and hasattr(component, "change"):
            self.theirs.setdefault(name, component)
            self._connect()

    def place(self, controls: Sequence[Any], line: Any) -> None:
        """Our own have been made; the API makes them again and again without a page, so the first ones count."""
        if self.ours is None:
            self.ours = list(controls), line
            self._connect()

    def _connect(self) -> None:
        if self.connected or self.ours is None or len(self.theirs) < len(self.names):
            return
        self.connected = True
        controls, line = self.ours
        inputs = [*(self.theirs[name] for name in self.names), *controls]
        event = {"fn": self.tell, "inputs": inputs, "outputs": [line], "show_progress": "minimal", "queue": False}
        for component in inputs:
            component.change(**event)
        gr.context.Context.root_block.load(**event)

    def tell(self, *values: Any) -> Any:
        """The line's text for these values of the controls."""
        sizes = dict(zip(self.names, values, strict=False))
        try:
            chosen = read(values[len(self.names) :], {})
        except LowVRAMError as error:
            return estimate.complaint(str(error))
        if not chosen["enabled"]:
            return ""
        pictures = _pictures(sizes, self.tab == "img2img")
        model = blueprint.model()
        if model is None:
            return estimate.note(f"{TITLE}: load a checkpoint to see what it needs")
        key = tuple(pictures), tuple(chosen.items()), blueprint.identity(model), host.free_in_steps(chosen["vram"])
        text = estimate.answer(self.tab, key, host.queue(), _teller(model, chosen, pictures))
        return gr.update() if text is None else text


def _teller(model: Any, chosen: dict[str, Any], pictures: list[run.Picture]) -> Callable[[], str]:
    def tell() -> str:
        lines = []
        for one in pictures:
            lines.append(estimate.sentence(functools.partial(run.foretell, model, chosen, one), _size(one)))
        return "".join(lines)

    return tell


def _size(picture: run.Picture) -> str:
    return f"{picture.width}x{picture.height}" + (f", batch {picture.batch}" if picture.batch > 1 else "")


def _pictures(sizes: dict[str, Any], encodes: bool) -> list[run.Picture]:
    """The passes of a generation: one, and a second with hires fix."""
    first = run.Picture(
        width=8 * max(1, int(sizes["width"] or 0) // 8),
        height=8 * max(1, int(sizes["height"] or 0) // 8),
        batch=max(1, int(sizes["batch_size"] or 1)),
        steps=max(1, int(sizes["steps"] or 1)),
        passes=2 if sizes["cfg_scale"] != 1 else 1,
        encodes=encodes,
    )
    if not sizes.get("hr"):
        return [first]
    width, height = _hires(first, sizes)
    return [first, dataclasses.replace(first, width=width, height=height, encodes=True)]


def _hires(first: run.Picture, sizes: dict[str, Any]) -> tuple[int, int]:
    """The second pass's pixels: by scale, or as given; where one side is 0, it follows the other."""
    width, height = int(sizes["hr_resize_x"] or 0), int(sizes["hr_resize_y"] or 0)
    scale = float(sizes["hr_scale"] or 1)
    if width and not height:
        scale = width / first.width
    elif height and not width:
        scale = height / first.height
    elif width and height:
        return 8 * (width // 8), 8 * (height // 8)
    return 8 * (int(first.width * scale) // 8), 8 * (int(first.height * scale) // 8)
