"""How much faster our kernels are here than torch's own operators, kernel by kernel and shape by shape."""

from __future__ import annotations

import functools

import torch

from ...devices.pairs import ratio
from ..attention.by_triton import triton
from ..attention.torch_kernels import fused
from . import geglu, group_norm, support

_MAPS = {"denoise": (2, 320, 64, 64), "decode": (1, 128, 512, 512)}
_TOKENS = (2, 4096, 2 * 1280)
_HEADS = {40: (2, 8, 4096), 80: (2, 8, 1024), 64: (2, 10, 4096), 512: (1, 1, 4096)}
"""Batch, heads and tokens by the heads' width: SD1.5's two largest, SDXL's, the autoencoder's middle."""


def gains(device: torch.device) -> dict[str, float]:
    """Seconds of torch's operators over those of the kernel, in float16: ratios of medians of runs in turn."""
    found = {}
    with torch.inference_mode():
        for layout in (torch.contiguous_format, torch.channels_last):
            for stage, shape in _MAPS.items():
                x = torch.randn(shape, device=device).half().to(memory_format=layout)
                plain = functools.partial(group_norm.reference, x, 32, None, None, 1e-5, True)
                name = f"group_norm, {stage}, {str(layout).removeprefix('torch.')}"
                found[name] = ratio(plain, functools.partial(group_norm.group_norm, x, 32), device)
        product = torch.randn(_TOKENS, device=device).half()
        ways = functools.partial(geglu.reference, product), functools.partial(geglu.geglu, product)
        found["geglu"] = ratio(*ways, device)
        for width, tokens in _HEADS.items():
            q, k, v = (torch.randn(*tokens, width, device=device).half() for _ in range(3))
            ways = functools.partial(fused, None, q, k, v), functools.partial(triton, q, k, v)
            found[f"{support.ATTENTION}, {width}"] = ratio(*ways, device)
    return found
