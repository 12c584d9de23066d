"""What we ask of ComfyUI: where it computes, how much memory it can have there, its bar and its cancel button.

ComfyUI's modules are imported where they are used, so that the node contract can be read without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..sd_lowvram.devices.info import free_vram
from ..sd_lowvram.progress import listen
from ..sd_lowvram.units import parse_size


def budget(written: str, device: torch.device) -> int:
    """Bytes in a node's budget; when it is empty, what is free plus what the host would unload to make room.

    Raises:
        BadInputError: it is no size.
    """
    if written.strip():
        return parse_size(written, "budget")
    return room(device)


def room(device: torch.device) -> int:
    """Bytes on ``device`` that are free, or that the host's own models hold and would give up."""
    from comfy import model_management as host

    held = sum(loaded.model_loaded_memory() for loaded in host.current_loaded_models if loaded.device == device)
    return int(free_vram(device) if device.type == "cpu" else host.get_free_memory(device)) + int(held)


def has_override() -> bool:
    """Whether this ComfyUI lets a model's options override its attention; older ones do not."""
    from comfy.ldm.modules import attention

    return hasattr(attention, "wrap_attn")


@contextlib.contextmanager
def bar() -> Iterator[None]:
    """Within the block long loops of the core move the running node's bar, and stop when the user cancels."""
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar

    bars: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        throw_exception_if_processing_interrupted()
        bars.setdefault(stage, ProgressBar(total)).update_absolute(done, total)

    with listen(show):
        yield


@contextlib.contextmanager
def replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Within the block ``owner`` has ``value`` as its own attribute; afterwards what it had, or had not, before."""
    here = vars(owner)
    before = here.get(attribute, here)
    here[attribute] = value
    try:
        yield
    finally:
        if before is here:
            here.pop(attribute, None)
        else:
            here[attribute] = before
