"""Attention as one function ``(q, k, v, mask, scale) -> out`` (:class:`.backend.AttentionFunction`): which backends
there are, what they refuse, and what they hold. All agree to rounding, but for those that say otherwise of themselves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ... import doors
from ...devices.info import dtype_on
from ...errors import SettingsError
from ...settings import Settings
from . import torch_kernels
from .backend import SCORE_BYTES, AttentionBackend
from .bounded import attend_sliced, fused_blocks, fused_softmax, sliced_blocks
from .problem import Problem, problem_of


def _torchs(kernel: str, held_bytes: Any) -> AttentionBackend:
    """Backend that runs one of torch's own kernels and no other."""
    why_not = functools.partial(torch_kernels.why_not, kernel)
    return AttentionBackend(functools.partial(torch_kernels.attend_fused, kernel), why_not, held_bytes)


BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": AttentionBackend(
        functools.partial(torch_kernels.attend_fused, None), label="torch's kernel by size, head width and GPU"
    ),
    "flash": _torchs("flash", torch_kernels.flash_bytes),
    "efficient": _torchs("efficient", torch_kernels.efficient_bytes),
    "xformers": AttentionBackend(
        torch_kernels.xformers,
        lambda problem: torch_kernels.xformers_why_not(problem.device),
        torch_kernels.efficient_bytes,
    ),
    "fused-softmax": AttentionBackend(fused_softmax, label="exact, holds no score matrix"),
    "sliced": AttentionBackend(attend_sliced, label="exact, by slices"),
    "triton": AttentionBackend(
        functools.partial(torch_kernels.attend_fused, None),
        lambda problem: "its kernels were slower than torch's and are no longer here: use sdpa",
    ),
    "cudnn": _torchs("cudnn", torch_kernels.cudnn_bytes),
}
"""Ours by their names in the settings. "triton" can be read, from what was saved with it, and not run."""


def backends() -> dict[str, AttentionBackend]:
    """All backends by name; registered ones come last."""
    doors.find()
    return BACKENDS | doors.ATTENTION_BACKENDS


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    upcast: bool = False,
    score_bytes: int = SCORE_BYTES,
) -> Tensor:
    """Compute attention by the backend of this name.

    Results for fake tensors are made here if the backend's kernels cannot be traced, and its bytes are booked.

    Args:
        name: a name in :func:`backends`.
        q, k, v, mask, scale, upcast, score_bytes: as for :class:`.backend.AttentionFunction`.

    Raises:
        SettingsError: the backend cannot run this shape, type, mask or device; the message says why, and what can.
    """
    backend = BACKENDS.get(name) or backends()[name]
    if backend.why_not is not None or backend.held_bytes is not None:
        problem = problem_of(q, k, v, mask, upcast)
        if backend.why_not is not None and (why := backend.why_not(problem)):
            raise SettingsError(f"attention={name!r} cannot run {problem}: {why}. {torch_kernels.REMEDY}")
        if backend.held_bytes is not None and not problem.real:
            return torch_kernels.emulate(name, q, k, v, mask, scale)
    return backend.attend(q, k, v, mask, scale, upcast=upcast, score_bytes=score_bytes)


def available_backends(device: torch.device) -> dict[str, str | None]:
    """Return every backend with the reason why it cannot run on ``device``; None if it can, for shapes that suit it."""
    problem = Problem(1, 1, 16, 16, 64, 64, dtype_on(device), device, real=is_present(device))
    return {name: backend.why_not(problem) if backend.why_not else None for name, backend in backends().items()}


def score_bytes(settings: Settings) -> int:
    """Bytes of scores held at once."""
    return SCORE_BYTES if settings.attention_mib is None else settings.attention_mib << 20


def is_present(device: torch.device) -> bool:
    """True if tensors with numbers can be made on ``device``."""
    return device.type == "cpu" or (device.type != "meta" and getattr(torch, device.type).is_available())


def kernel_name(backend: str, problem: Problem, score_bytes: int = SCORE_BYTES) -> str:
    """The kernel that runs ``problem``: the backend's own name, or what "sdpa" chooses."""
    return torch_kernels.choose_kernel(problem, score_bytes) if backend == "sdpa" else backend


def held_bytes(backend: str, problem: Problem, score_bytes: int = SCORE_BYTES) -> int:
    """Bytes that a backend, or one of the kernels of "sdpa", holds in addition to its arguments and its output."""
    kernel = kernel_name(backend, problem, score_bytes)
    if kernel == "sliced":
        return sliced_blocks(problem, score_bytes).bytes
    if kernel == "fused-softmax":
        return fused_blocks(problem, score_bytes).bytes
    if kernel == "torch":
        return 2 * problem.scores * problem.score_dtype.itemsize
    held = backends()[kernel].held_bytes
    return held(problem) if held is not None else 0
