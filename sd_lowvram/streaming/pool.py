"""The device's side of streamed weights: one buffer of bytes, and the weights as views into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..memory import weights_account
from ..memory.accounts import actual_device
from ..memory.host_offload import dense_strides
from .layers import place_bytes


class Pool:
    """Bytes on the device, taken once and given back at once.

    Attributes:
        bytes: how many.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = size
        with weights_account(), torch.inference_mode(False), torch.no_grad():
            self._buffer = torch.empty(size, dtype=torch.uint8, device=actual_device(device))
        self._typed: dict[torch.dtype, Tensor] = {}

    def views(self, contents: Iterable[Tensor], offset: int) -> list[Tensor]:
        """Views of the buffer for tensors like ``contents``, in order from ``offset``, with their strides if dense."""
        views = []
        with torch.inference_mode(False), torch.no_grad():
            for like in contents:
                elements = self._elements(like.dtype)
                views.append(elements.as_strided(like.shape, dense_strides(like), offset // like.element_size()))
                offset += place_bytes(like)
        return views

    def span(self, start: int, size: int) -> Tensor:
        """Bytes of it."""
        with torch.inference_mode(False), torch.no_grad():
            return self._buffer[start : start + size]

    def _elements(self, dtype: torch.dtype) -> Tensor:
        """The buffer as numbers of a type."""
        if dtype not in self._typed:
            self._typed[dtype] = self._buffer[: self.bytes - self.bytes % dtype.itemsize].view(dtype)
        return self._typed[dtype]
