"""What the WebUI has: which of the three it is, its model, and who moves the weights. Everything by duck typing.

AUTOMATIC1111 holds an ldm or sgm shell; reForge the same shell beside ``forge_objects``; Forge only ``forge_objects``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from modules import devices, shared
from torch import Tensor, nn

from sd_lowvram.devices.info import available_ram, free_vram
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.session import anatomy_of
from sd_lowvram.units import parse_size
from sd_lowvram.weights import all_tensors

WEIGHTS = frozenset({"offload", "weights_mib", "split_layers", "weight_storage"})
"""Knobs of where weights live and in which form: only for a host that leaves them alone."""


def kind(model: Any) -> str:
    """Which host it is, told from the loaded model: "a1111", "reforge" or "forge"."""
    if not hasattr(model, "forge_objects"):
        return "a1111"
    return "reforge" if isinstance(model, nn.Module) else "forge"


def is_loaded(model: Any) -> bool:
    """Whether ``model`` is one, rather than the stand-in of before the first load."""
    return model is not None and (hasattr(model, "first_stage_model") or hasattr(model, "forge_objects"))


def moves_weights(model: Any) -> bool:
    """Whether the host moves weights itself: Forge and reForge always, AUTOMATIC1111 with --medvram and --lowvram."""
    if hasattr(model, "moves"):
        return bool(model.moves)
    return kind(model) != "a1111" or bool(getattr(model, "lowvram", False))


def anatomy(model: Any) -> Anatomy:
    """The anatomy of a model, or of a blueprint that brings its own."""
    return model.anatomy if hasattr(model, "moves") else anatomy_of(model)


def device() -> torch.device:
    """Where the host computes."""
    return torch.device(devices.device)


def budget(text: str, model: Any, where: torch.device) -> tuple[int, int]:
    """Bytes for the run as the user states them, or what is free now with the model's own weights counted as free; and
    how many of them the host's other modules hold on the device, the text encoders above all."""
    if hasattr(model, "other_bytes"):
        return parse_size(text, "vram") if text else free_vram(where), model.other_bytes
    ours = _bytes_on(where, all_tensors(*anatomy_of(model).components.values()))
    shell = all_tensors(model) if isinstance(model, nn.Module) and not moves_weights(model) else []
    others = max(0, _bytes_on(where, shell) - ours)
    return (parse_size(text, "vram") if text else free_vram(where) + ours + others), others


def _bytes_on(where: torch.device, tensors: list[Tensor]) -> int:
    here = (tensor for tensor in tensors if tensor.device.type == where.type)
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def free_in_steps(text: str) -> int:
    """What is free now in steps of 256 MiB, where no budget is stated: for telling one answer from the next."""
    return 0 if text else free_vram(device()) >> 28


def queue() -> Any:
    """The lock of the host's queue of generations."""
    from modules import call_queue

    return call_queue.queue_lock


def host_budget(text: str) -> int:
    """Bytes of host memory: as stated, or what is free now."""
    return parse_size(text, "ram") if text else available_ram()


@contextlib.contextmanager
def precision_of_attention() -> Iterator[None]:
    """Within the block ldm's and sgm's attentions ask for float32 only where the host's own setting does."""
    wanted = "fp32" if getattr(shared.opts, "upcast_attn", False) else "fp16"
    names = ("ldm.modules.attention", "sgm.modules.attention")
    modules: list[Any] = [sys.modules[name] for name in names if name in sys.modules]
    modules = [module for module in modules if hasattr(module, "_ATTN_PRECISION")]
    before = [module._ATTN_PRECISION for module in modules]
    for module in modules:
        module._ATTN_PRECISION = wanted
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module._ATTN_PRECISION = value


@contextlib.contextmanager
def in_the_weights_type(unet: Any) -> Iterator[None]:
    """Within the block ldm's UNet starts in its weights' type, where the host leaves that to autocast, which a trace
    has none of: what autocast holds in float32 for the moment of a norm is not foretold."""
    before = vars(unet).get("dtype") if unet is not None else None
    if not isinstance(before, torch.dtype):
        yield
        return
    unet.dtype = next(unet.parameters()).dtype
    try:
        yield
    finally:
        unet.dtype = before
