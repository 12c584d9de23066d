"""What we ask of ComfyUI: where it computes, how much memory it can have there, its bar and its cancel button.

ComfyUI's modules are imported where they are used, so that the node contract can be read without them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..sd_lowvram.devices.info import free_vram
from ..sd_lowvram.devices.this_machine import budget_of
from ..sd_lowvram.progress import listen
from ..sd_lowvram.units import parse_size
from .interfaces import ModelPatcher
from .loading import Loading


def budget(written: str, device: torch.device) -> int:
    """Bytes in a node's budget; when it is empty, what this process can have once the host has unloaded its models.

    Raises:
        BadInputError: it is no size.
    """
    if written.strip():
        return parse_size(written, "budget")
    return budget_of(device, room(device))


def room(device: torch.device) -> int:
    """Bytes for tensors on ``device``: free, or held by the host's own models, which it would give up."""
    from comfy import model_management as host

    held = sum(loaded.model_loaded_memory() for loaded in host.current_loaded_models if loaded.device == device)
    return int(free_vram(device) if device.type == "cpu" else host.get_free_memory(device)) + int(held)


def loading(device: torch.device) -> Loading:
    """How much of a model's weights the host keeps on ``device``: its own rules, by how it was started."""
    from comfy import model_management as host

    state = host.VRAMState
    if device.type == "cpu" or host.vram_state not in (state.NO_VRAM, state.LOW_VRAM, state.NORMAL_VRAM):
        return Loading()
    if host.vram_state == state.NO_VRAM:
        return Loading(whole=False)
    most = max(_LEAST_KEPT, room(device) - int(host.minimum_inference_memory()))
    return Loading(whole=False, least=_LEAST_KEPT, most=most, reserve=int(host.extra_reserved_memory()))


_LEAST_KEPT = 128 << 20
"""Bytes of weights that the host loads however little is free."""


def has_override() -> bool:
    """Whether this ComfyUI lets a model's options override its attention; older ones do not."""
    from comfy.ldm.modules import attention

    return hasattr(attention, "wrap_attn")


_FUSED = {"attention_pytorch", "attention_xformers", "attention_sage", "attention_flash"}


def attends_fused() -> bool:
    """Whether the kernel that the host has chosen for this machine holds no score matrix."""
    from comfy.ldm.modules import attention

    return getattr(attention.optimized_attention, "__name__", "") in _FUSED


def computes(model: ModelPatcher) -> torch.dtype | None:
    """The type that the host casts a UNet's weights to while it computes; None: it computes in their own."""
    return getattr(model.model, "manual_cast_dtype", None)


def passes(guider: Any, model_options: Mapping[str, Any]) -> int:
    """Rows of the UNet's batch for each picture: at a scale of 1 the host leaves the negative prompt out."""
    scale = getattr(guider, "cfg", None)
    left_out = not model_options.get("disable_cfg1_optimization", False)
    return 1 if scale is not None and math.isclose(scale, 1.0) and left_out else 2


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
