"""The device's side of streamed weights: one buffer of bytes, and the weights as views into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..memory import weights_account
from ..memory.accounts import actual_device
from ..memory.host_offload import dense_strides
from ..memory.limit import note_buffer
from .layers import place_bytes


class Pool:
    """A buffer on the device, allocated once and freed once.

    Attributes:
        bytes: its size.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """
        Args:
            size: bytes of the buffer.
            device: where to allocate it.
        """
        self.bytes = size
        with weights_account(), torch.inference_mode(False), torch.no_grad():
            self._buffer = torch.empty(size, dtype=torch.uint8, device=actual_device(device))
        note_buffer(self._buffer)
        self._typed: dict[torch.dtype, Tensor] = {}

    def views(self, contents: Iterable[Tensor], offset: int) -> list[Tensor]:
        """Return views of the buffer for tensors like ``contents``, one after the other.

        Args:
            contents: tensors whose shapes and types the views get; dense strides are preserved.
            offset: byte at which the first view begins.

        Returns:
            The views, in order.
        """
        views = []
        with torch.inference_mode(False), torch.no_grad():
            for like in contents:
                elements = self._elements(like.dtype)
                views.append(elements.as_strided(like.shape, dense_strides(like), offset // like.element_size()))
                offset += place_bytes(like)
        return views

    def span(self, start: int, size: int) -> Tensor:
        """Return ``size`` bytes of the buffer from ``start``."""
        with torch.inference_mode(False), torch.no_grad():
            return self._buffer[start : start + size]

    def _elements(self, dtype: torch.dtype) -> Tensor:
        """The buffer as numbers of a type."""
        if dtype not in self._typed:
            self._typed[dtype] = self._buffer[: self.bytes - self.bytes % dtype.itemsize].view(dtype)
        return self._typed[dtype]
