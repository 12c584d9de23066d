"""Which masters have been settled in host memory, also those of layers that came later or were moved since."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..memory.fake_mode import active_fake_mode
from .host_weights import Masters, masters_of


class HostMasters:
    """The masters of a model's tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: list[Masters] = []
        self._known: dict[int, tuple[Tensor, Masters, Any]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Settle those of ``tensors`` that are new, or hold other memory than before; forget those that are gone."""
        present = {id(tensor): tensor for tensor in tensors}
        known = {key: self._known[key] for key in present if key in self._known}
        news = [t for key, t in present.items() if key not in known or known[key][2] != _place(t)]
        moved = {str(t.device) for t in news if id(t) in known and t.device.type != "cpu"}
        if moved:
            warnings.warn(
                f"weights that sd-lowvram streams were moved to {', '.join(sorted(moved))}: they go back to host "
                "memory; call restore() first to have them elsewhere",
                stacklevel=2,
            )
        self._known = known
        if news:
            masters = masters_of(news, None, self._device)
            if active_fake_mode(news[0]) is None:
                self._groups.append(masters)
            self._known |= {id(tensor): (tensor, masters, _place(tensor)) for tensor in news}

    def masters(self, tensor: Tensor) -> Masters:
        """Who copies what ``tensor`` holds to the device."""
        return self._known[id(tensor)][1]

    def undo(self) -> None:
        """Bring all tensors back to where they were."""
        self._known.clear()
        while self._groups:
            self._groups.pop().undo()


def _place(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype
