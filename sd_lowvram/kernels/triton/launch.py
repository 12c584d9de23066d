"""Launching of kernels."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def launching(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Launch kernels on the GPU of ``x`` within the block."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
