"""How much faster the fused kernels are here than torch's own operators, kernel by kernel and shape by shape."""

from __future__ import annotations

import functools

import torch

from ..pairs import ratio
from . import geglu, group_norm

_MAPS = {"denoise": (2, 320, 64, 64), "decode": (1, 128, 512, 512)}
_TOKENS = (2, 4096, 2 * 1280)


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
    return found
