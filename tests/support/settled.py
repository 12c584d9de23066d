"""Host weights that take so much host memory, for tests of what waits there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from sd_lowvram.streaming.host_weights import HostWeights, host_budget


def host_weights_of(tensors: Iterable[Tensor], ram_bytes: int | None, device: torch.device) -> HostWeights:
    """Host weights of ``tensors``; ``ram_bytes`` None: in the budget that is there."""
    with contextlib.nullcontext() if ram_bytes is None else host_budget(ram_bytes):
        host_weights = HostWeights(device)
    host_weights.add(tensors)
    return host_weights
