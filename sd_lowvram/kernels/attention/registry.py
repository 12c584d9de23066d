"""Attention as one function ``(q, k, v, mask, scale) -> out``: the backends, and what they hold.

q is (batch, heads, queries, width), k (batch, heads, keys, width), v (batch, heads, keys, value width), the mask bool
(True attends) or additive and broadcastable to (batch, heads, queries, keys), the scale of the scores width**-0.5 when
not given. The result is (batch, heads, queries, value width). All backends agree to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...devices.info import dtype_on
from ...settings import Settings
from ..triton import support
from . import torch_kernels
from .bounded import SCORE_BYTES, fused_blocks, fused_softmax, sliced, sliced_blocks
from .by_triton import triton
from .problem import Problem

AttentionFunction = Callable[..., Tensor]

BACKENDS: dict[str, AttentionFunction] = {
    "sdpa": functools.partial(torch_kernels.fused, None),
    "flash": functools.partial(torch_kernels.fused, "flash"),
    "efficient": functools.partial(torch_kernels.fused, "efficient"),
    "xformers": torch_kernels.xformers,
    "fused-softmax": fused_softmax,
    "sliced": sliced,
    "triton": triton,
    "cudnn": functools.partial(torch_kernels.fused, "cudnn"),
}
"""Every backend by its name in the settings; all have the signature of `sliced`."""


def available_backends(device: torch.device) -> dict[str, str | None]:
    """Every backend, and why it cannot run on ``device``: None where it can, for the shapes that suit it."""
    real = is_present(device)
    problem = Problem(1, 1, 16, 16, 64, 64, dtype_on(device), device, real=real)
    reasons: dict[str, str | None] = dict.fromkeys(BACKENDS)
    reasons |= {kernel: torch_kernels.refusal(kernel, problem) for kernel in ("flash", "efficient", "cudnn")}
    reasons["xformers"] = torch_kernels.xformers_refusal(device)
    reasons["triton"] = support.refusal(device)
    return reasons


def score_bytes(settings: Settings) -> int:
    """Bytes of scores held at once."""
    return SCORE_BYTES if settings.attention_mib is None else settings.attention_mib << 20


def is_present(device: torch.device) -> bool:
    """Whether tensors with numbers can be made on ``device``."""
    return device.type == "cpu" or (device.type != "meta" and getattr(torch, device.type).is_available())


def kernel_name(backend: str, problem: Problem, score_bytes: int = SCORE_BYTES) -> str:
    """The kernel that runs ``problem``: the backend's own name, or what "sdpa" chooses."""
    return torch_kernels.choose_kernel(problem, score_bytes) if backend == "sdpa" else backend


def held_bytes(backend: str, problem: Problem, score_bytes: int = SCORE_BYTES) -> int:
    """Bytes that a backend, or one of the kernels of "sdpa", holds beside its arguments and its output."""
    kernel = kernel_name(backend, problem, score_bytes)
    if kernel == "sliced":
        return sliced_blocks(problem, score_bytes).bytes
    if kernel == "fused-softmax":
        return fused_blocks(problem, score_bytes).bytes
    if kernel == "flash":
        return torch_kernels.flash_bytes(problem)
    if kernel == "cudnn":
        return torch_kernels.cudnn_bytes(problem)
    if kernel == "triton":
        return 0
    if kernel == "torch":
        return 2 * problem.scores * problem.score_dtype.itemsize
    return torch_kernels.efficient_bytes(problem)
