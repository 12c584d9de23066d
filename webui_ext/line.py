"""The prediction in the panel and in its head: follows the host's size controls and ours."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from sd_lowvram.errors import LowVRAMError

from . import checkpoint_preview, estimate, host, run
from .arguments import TITLE, arguments, read
from .picture import Generation, side, steps_run

_SIZES = ("width", "height", "batch_size", "steps", "cfg_scale", "denoising_strength")
_HIRES = ("hr", "hr_scale", "hr_resize_x", "hr_resize_y", "hires_steps")
_RESIZE_BY = ("by_scale", "scale", "scale_resolution_preview")
"""Controls of img2img's "Resize by": the open tab, the factor, and the resulting size on the page."""


class Line:
    """Gathers the controls of one tab while the page is built, in whatever order they come, and connects them."""

    def __init__(self, tab: str) -> None:
        self.tab = tab
        self.names = (*_SIZES, *(_HIRES if tab == "txt2img" else _RESIZE_BY))
        self.theirs: dict[str, Any] = {}
        self.ours: tuple[list[Any], list[Any]] | None = None
        self.tiled: list[Any] = []
        self.connected = False

    def offer(self, component: Any, elem_id: str | None) -> None:
        """A control of the host, or of another extension, has been made."""
        if not self.connected and _turns_tiles_on(component):
            self.tiled.append(component)
        if "by_scale" in self.names and "width" not in self.theirs and _is_hidden_number(component, elem_id):
            self.theirs["by_scale"] = component  # of the open tab: it has no name, and is the last before the sizes
        # a checkbox that folds something names itself after the accordion, which is offered too
        name = (elem_id or "").removeprefix(f"{self.tab}_").removesuffix("-checkbox")
        if elem_id and elem_id.startswith(self.tab) and name in self.names and hasattr(component, "change"):
            self.theirs.setdefault(name, component)
            self._connect()

    def place(self, controls: Sequence[Any], line: Any, head: Any) -> None:
        """Our own have been made; the API makes them again and again without a page, so the first ones count."""
        if self.ours is None:
            self.ours = list(controls), [line, head]
            self._connect()

    def _connect(self) -> None:
        if self.connected or self.ours is None or len(self.theirs) < len(self.names):
            return
        self.connected = True
        controls, outputs = self.ours
        inputs = [*(self.theirs[name] for name in self.names), *controls, *self.tiled]
        event = {"fn": self.tell, "inputs": inputs, "outputs": outputs, "show_progress": "hidden", "queue": False}
        second = event | {"fn": self.tell_in_turn}  # the last verdict stays until then, dimmed
        enabled = controls[[argument.name for argument in arguments()].index("enabled")]
        enabled.change(**event).then(**second)  # also when it goes off, which empties both
        gate = _gate_script(inputs.index(enabled), len(inputs), self.tab)
        event["_js" if gr.__version__.startswith("3.") else "js"] = gate
        for component in inputs:
            if component is not enabled:
                component.change(**event).then(**second)
        gr.context.Context.root_block.load(**event).then(**second)

    def tell(self, *values: Any) -> list[Any]:
        """The line and the head for these values of the controls, at once."""
        return self._updates(values, patient=False)

    def tell_in_turn(self, *values: Any) -> list[Any]:
        """The line and the head for these values, when no picture is under way any more."""
        return self._updates(values, patient=True)

    def _updates(self, values: Sequence[Any], patient: bool) -> list[Any]:
        texts = self._estimate(values, patient)
        return [gr.update(), gr.update()] if texts is None else [texts.line, texts.head]

    def _estimate(self, values: Sequence[Any], patient: bool) -> estimate.Told | None:
        sizes = dict(zip(self.names, values, strict=False))
        try:
            chosen = read(values[len(self.names) :], {})
        except LowVRAMError as error:
            return estimate.complaint(str(error))
        if not chosen["enabled"]:
            return estimate.Told()
        chosen |= {"tiled": True} if any(values[len(self.names) + len(arguments()) :]) else {}
        model = checkpoint_preview.model()
        if model is None:
            return estimate.note(f"{TITLE}: load a checkpoint to see what it needs")
        pictures = _pictures(sizes, model, self.tab == "img2img")
        if not pictures:
            return estimate.note(f"{TITLE}: choose a picture to see what it needs at this scale")
        shown = checkpoint_preview.identity(model), host.free_in_steps(chosen["vram"])
        key = tuple(pictures), tuple(chosen.items()), *shown
        return estimate.answer(self.tab, key, host.queue(), _teller(model, chosen, pictures), patient)


def _gate_script(switch: int, count: int, tab: str) -> str:
    """JavaScript that the page runs before it calls us: while the panel is off it waits and calls nothing.

    The verdict of the earlier values is dimmed until the answer takes its place: a timer of gradio's would cover it.

    Args:
        switch: position of "enabled" among the values.
        count: number of our inputs, after which gradio puts the outputs.
        tab: the panel's.
    """
    earlier = f"globalThis.document?.querySelectorAll('[id^={tab}_sd_lowvram_] [data-verdict]')"
    dim = f"{earlier}.forEach(one => {{ one.style.opacity = 0.4 }})"
    return f"(...values) => values[{switch}] ? ({dim}, values.slice(0, {count})) : new Promise(() => {{}})"


def _turns_tiles_on(component: Any) -> bool:
    """True for the switch of another extension's Tiled VAE."""
    is_switch = type(component).__name__ in ("Checkbox", "InputAccordion")
    return is_switch and bool(_TILED.search(str(getattr(component, "label", ""))))


_TILED = re.compile(r"\btiled vae\b", re.IGNORECASE)


def _is_hidden_number(component: Any, elem_id: str | None) -> bool:
    return not elem_id and type(component).__name__ == "Number" and not component.visible


def _teller(model: Any, chosen: dict[str, Any], pictures: list[Generation]) -> Callable[[], estimate.Told]:
    def tell() -> estimate.Told:
        plans = ((functools.partial(run.plan_for, model, chosen, picture), _size(picture)) for picture in pictures)
        return estimate.join_texts([estimate.sentence(*plan) for plan in plans])

    return tell


def _size(picture: Generation) -> str:
    return f"{picture.width}x{picture.height}" + (f", batch {picture.batch}" if picture.batch > 1 else "")


def _pictures(sizes: dict[str, Any], model: Any, encodes: bool) -> list[Generation]:
    """The passes of a generation: one, and a second with hires fix; none while "Resize by" has no picture."""
    asked = float(sizes["width"] or 0), float(sizes["height"] or 0)
    if sizes.get("by_scale"):
        numbers = _MADE.findall(str(sizes["scale_resolution_preview"]))
        if not numbers:
            return []
        asked = float(numbers[-1][0]), float(numbers[-1][1])
    scale, steps = sizes["cfg_scale"], max(1, int(sizes["steps"] or 1))
    first = Generation(
        width=side(asked[0], encodes),
        height=side(asked[1], encodes),
        batch=max(1, int(sizes["batch_size"] or 1)),
        steps=steps_run(steps, sizes["denoising_strength"]) if encodes else steps,
        passes=host.passes(model, 1 if scale is None else scale),
        encodes=encodes or host.encodes_always(model),
    )
    if not sizes.get("hr"):
        return [first]
    width, height = (side(size, encodes=True) for size in _hires(asked, sizes))
    second = int(sizes["hires_steps"] or 0) or steps  # all of them run, whatever the denoising strength
    return [first, dataclasses.replace(first, width=width, height=height, steps=second, encodes=True)]


_MADE = re.compile(r"(\d+)x(\d+)")


def _hires(asked: tuple[float, float], sizes: dict[str, Any]) -> tuple[float, float]:
    """The second pass's pixels: by scale, or as given; where one side is 0, it follows the other."""
    width, height = int(sizes["hr_resize_x"] or 0), int(sizes["hr_resize_y"] or 0)
    if width and height:
        return width, height
    scale = float(sizes["hr_scale"] or 1)
    if width or height:
        scale = width / asked[0] if width else height / asked[1]
    return asked[0] * scale, asked[1] * scale
