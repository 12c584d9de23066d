"""Fake tensors (shape, strides and type without contents): whether one is at hand, and making them fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.private import FakeTensor, FakeTensorMode, disable_fakes, dispatch_modes, made_fake

CPU = torch.device("cpu")


def active_fake_mode(*tensors: Tensor) -> FakeTensorMode | None:
    """Return the fake mode of the caller, or of these tensors; None if there is none."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    for mode in dispatch_modes():
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def fake_empty(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A fake tensor as ``torch.empty_strided`` makes it in ``mode``, without its slow dispatch."""
    with disable_fakes():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return fake_around(meta, mode, device)


def fake_around(meta: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor around ``meta``: the first of a mode by torch's own slow constructor, later ones as its copies."""
    alike: dict[torch.device, dict[str, Any]] = vars(mode).setdefault("_sd_lowvram_alike", {})
    if device not in alike:
        first = FakeTensor(mode, meta, device)
        alike[device] = dict(vars(first))
        return first
    fake: Tensor = made_fake(meta, device)
    vars(fake).update(alike[device])
    return fake
