"""What a launch of a kernel needs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def launching(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, kernels are launched on the card of ``x``."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
