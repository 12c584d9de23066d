"""Attention by our kernels in Triton: one for heads up to 256 channels wide, one for the 512 of the autoencoder."""

from __future__ import annotations

import torch
from torch import Tensor

from ..triton import support
from .backend import SCORE_BYTES
from .problem import Problem, has_bf16

_NARROW, _WIDEST = 256, 512


def triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    upcast: bool = False,
    score_bytes: int = SCORE_BYTES,
) -> Tensor:
    """Partially fused softmax attention: of a row's scores only maximum and sum are kept, both in float32 as the scores
    are. The same bits at every run. `why_not` has been asked before. Other arguments and result as in `sliced`.
    """
    if max(q.shape[-1], v.shape[-1]) <= _NARROW:
        from ..triton.attention import fused_softmax

        return fused_softmax(q, k, v, mask, scale)
    from ..triton.wide_attention import wide_softmax

    return wide_softmax(q, k, v, mask, scale)


def why_not(problem: Problem) -> str | None:
    """Why the kernels cannot run this problem; None when they can."""
    if problem.dtype not in support.TYPES:
        return f"they compute in fp32, fp16 and bf16, not in {str(problem.dtype).removeprefix('torch.')}"
    if problem.dtype == torch.bfloat16 and not has_bf16(problem.device):
        return "they compute in bf16 on an Ampere GPU or newer"
    if problem.value_width > _WIDEST:
        return f"head width {problem.value_width} is above {_WIDEST}"
    return support.why_not(problem.device)
