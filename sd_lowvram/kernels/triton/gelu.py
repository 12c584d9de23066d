"""GELU as one kernel: the exact form, by the error function, and the form by tanh, of float32 or narrower.

The form by tanh takes seven intermediates when it is written out in operators: it is x * sigmoid(2 u) with
u = sqrt(2 / pi) (x + 0.044715 x^3). Arithmetic in float32, rounded once. Fidelity: ``rounding``.
Source: Hendrycks and Gimpel 2016; as one kernel, Chen et al. 2023, "Speed Is All You Need".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..attention.problem import is_fake
from .launch import launching

_BLOCK = 1024


def reference(x: Tensor, approximate: str = "none") -> Tensor:
    """What `gelu` does, in plain PyTorch."""
    return functional.gelu(x, approximate=approximate)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of a tensor of any shape; ``approximate`` is "none" or "tanh", as for torch. A new tensor."""
    if is_fake(x):
        return functional.gelu(x, approximate=approximate)
    x = x if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
    out = torch.empty_like(x)
    with launching(x):
        _gelu_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), TANH=approximate == "tanh", BLOCK=_BLOCK)
    return out


@triton.jit
def _gelu_kernel(x, out, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    result = by_tanh(value) if TANH else by_erf(value)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def by_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def by_tanh(x):
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
