"""Shapes, type and device of an attention call, which determine kernels and memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...compat.private import FakeTensor
from ...devices.performance import AMPERE
from ...memory.accounts import traces_cpu


@dataclass(frozen=True)
class Problem:
    """A call of attention without its numbers.

    Attributes:
        batch, heads, queries, keys: shape of the score matrix.
        width, value_width: channels of a head in q and k, and in v.
        mask: None, "bool" or "float"; ``mask_elements`` counts it before broadcasting.
        upcast: True if scores are requested in float32.
        real: True if the tensors hold numbers. Of fake ones only shapes are known, and their device may be absent.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    mask: str | None = None
    mask_elements: int = 0
    upcast: bool = False
    real: bool = True

    @property
    def score_dtype(self) -> torch.dtype:
        """The type of scores in plain torch. Half types widen on the CPU, whose products and sums would copy them."""
        widens = self.upcast or (self.device.type == "cpu" and self.dtype.itemsize == 2)
        return torch.promote_types(self.dtype, torch.float32) if widens else self.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """The type in which probabilities and values are multiplied in plain torch."""
        return self.score_dtype if self.device.type == "cpu" else self.dtype

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.queries * self.keys

    def __str__(self) -> str:
        masked = f", {self.mask} mask" if self.mask else ""
        width = f"{self.width}" if self.width == self.value_width else f"{self.width} (values {self.value_width})"
        shape = f"{self.batch} x {self.heads} heads of width {width}, {self.queries} queries, {self.keys} keys"
        return f"{shape}, {str(self.dtype).removeprefix('torch.')} on {self.device.type}{masked}"


def problem_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, upcast: bool = False) -> Problem:
    """Return the problem of a call of attention.

    Args:
        q, k, v, mask: as for :func:`.bounded.attend_sliced`.
        upcast: True if scores are requested in float32.
    """
    kind = None if mask is None else "bool" if mask.dtype == torch.bool else "float"
    elements = 0 if mask is None else mask.numel()
    batch, heads, queries, width = q.shape
    shape = batch, heads, queries, k.shape[2], width, v.shape[3]
    real = not is_fake(q)
    return Problem(*shape, q.dtype, q.device if real else device_of_run(q.device), kind, elements, upcast, real)


def device_of_run(device: torch.device) -> torch.device:
    """Return the device of the run: in a trace for a GPU that GPU, although its fake tensors are on the CPU."""
    return torch.device("cuda") if device.type in ("cpu", "meta") and not traces_cpu() else device


def is_fake(tensor: Tensor) -> bool:
    """True if the tensor has a shape and no numbers."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability; of a device that is not here, a Turing card's, for which kernels take more memory."""
    if device.type == "cuda" and torch.cuda.is_available() and not is_planned_elsewhere():
        return _capability(device)
    return 7, 5


@functools.lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_bf16(device: torch.device) -> bool:
    """True if fused kernels compute in bf16 on ``device``: Ampere and newer.

    For a GPU of another machine only its plan knows."""
    planned = _planned.get()
    if device.type != "cuda" or planned is not None:
        return planned is None or planned.bf16
    return not torch.cuda.is_available() or capability(device) >= AMPERE


class PlannedGpu(NamedTuple):
    """The GPU of a plan.

    Attributes:
        bf16: whether it computes in bf16.
        here: whether it is this machine's; what is installed here says nothing of another one.
    """

    bf16: bool = True
    here: bool = True


_planned: ContextVar[PlannedGpu | None] = ContextVar("the GPU that is planned for", default=None)


def is_planned_elsewhere() -> bool:
    """True within a plan for a GPU of another machine."""
    planned = _planned.get()
    return planned is not None and not planned.here


@contextlib.contextmanager
def assume_gpu(gpu: PlannedGpu) -> Iterator[None]:
    """Choose kernels for ``gpu`` within the block."""
    token = _planned.set(gpu)
    try:
        yield
    finally:
        _planned.reset(token)


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """(batch, heads, queries, value width), in memory (batch, queries, heads, value width)."""
    batch, heads, queries, _ = q.shape
    return torch.empty(batch, queries, heads, v.shape[-1], dtype=v.dtype, device=q.device).transpose(1, 2)
