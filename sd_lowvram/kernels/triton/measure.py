"""Comparison of our kernels with torch's own operators, at shapes of Stable Diffusion, on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...devices.pairs import ratio
from . import geglu, group_norm

_MAPS = {"denoise": (2, 320, 64, 64), "decode": (1, 128, 512, 512)}
_LAYOUTS = (torch.contiguous_format, torch.channels_last)
_TOKENS = (2, 4096, 2 * 1280)

Pair = tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...]]
"""A kernel, torch's own operators, and the tensors that both are given."""


def _noise(*shape: int, device: torch.device) -> Tensor:
    """Noise from a generator of its own: a measurement shifts no user's seed."""
    return torch.randn(shape, device=device, generator=torch.Generator(device))


def _norm_inputs(shape: tuple[int, ...], layout: torch.memory_format, device: torch.device, dtype: torch.dtype) -> Pair:
    how: dict[str, Any] = {"groups": 32, "weight": None, "bias": None, "eps": 1e-5, "silu": True}
    x = _noise(*shape, device=device).to(dtype, memory_format=layout)
    return functools.partial(group_norm.group_norm, **how), functools.partial(group_norm.reference, **how), (x,)


def _geglu_inputs(device: torch.device, dtype: torch.dtype) -> Pair:
    return geglu.geglu, geglu.reference, (_noise(*_TOKENS, device=device).to(dtype),)


def _layout_name(layout: torch.memory_format) -> str:
    return str(layout).removeprefix("torch.")


PAIRS: dict[str, Callable[[torch.device, torch.dtype], Pair]] = {
    **{
        f"group_norm, {stage}, {_layout_name(layout)}": functools.partial(_norm_inputs, shape, layout)
        for layout in _LAYOUTS
        for stage, shape in _MAPS.items()
    },
    "geglu": _geglu_inputs,
}
"""Functions that draw the compared pairs on a device in a type, by the names of :func:`gains`."""


def gains(device: torch.device) -> dict[str, float]:
    """Seconds of torch's operators over those of the kernel, in float16: ratios of medians of runs in turn."""
    ratios = {}
    with torch.inference_mode():
        for name, drawn in PAIRS.items():
            kernel, reference, inputs = drawn(device, torch.float16)
            ways = functools.partial(reference, *inputs), functools.partial(kernel, *inputs)
            ratios[name] = ratio(*ways, device)
    return ratios
