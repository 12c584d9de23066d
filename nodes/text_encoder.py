"""A limit on the weights of a text encoder under dynamic VRAM, for every load after Low VRAM.

Text encoders run before the sampler, each prompt in one call, so they are limited and not planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..sd_lowvram.devices.overhead import Overhead
from ..sd_lowvram.devices.this_machine import overhead_of
from . import host
from .dynamic_vram import limit_each_load

_WORKING_BYTES = 512 << 20
"""Bytes left free for intermediate results. ComfyUI computes texts in float32, so a layer of T5-XXL or Qwen3-8B that is
widened (200 MiB) and maps of 512 tokens (100 MiB) are in it."""


def limited_clip(clip: Any, budget: str, warn: Callable[[str], None]) -> Any:
    """A copy of ComfyUI's CLIP, of which dynamic VRAM holds no more weights than fit into ``budget``.

    Args:
        clip: None, or one that nodes may have patched.
        budget: as it was written; if it is empty, ``clip`` is returned as it is.
        warn: called with a sentence if the limit is refused.
    """
    if clip is None or not budget.strip():
        return clip
    limited = clip.clone()
    device = limited.patcher.load_device

    def capacity() -> int:
        overhead = overhead_of(device) if torch.cuda.is_available() else Overhead()
        return host.budget(budget, device) - overhead.context_bytes - _WORKING_BYTES

    limit_each_load(limited.patcher, capacity, warn)
    return limited
