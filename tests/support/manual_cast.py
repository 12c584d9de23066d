"""Layers with weights of one type that compute in the type of what comes, as ComfyUI's ``manual_cast`` has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _cast(layer: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return tuple(None if one is None else one.to(x.dtype) for one in (layer.weight, layer.bias))  # type: ignore[return-value]


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _cast(self, x)
        return F.linear(x, weight, bias)  # type: ignore[arg-type]


class Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, *_cast(self, x))  # type: ignore[arg-type]


class GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, *_cast(self, x), self.eps)


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, *_cast(self, x), self.eps)


CASTING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear, nn.Conv2d: Conv2d, nn.GroupNorm: GroupNorm, nn.LayerNorm: LayerNorm,
}  # fmt: skip


def manual_cast(model: nn.Module, stored: torch.dtype) -> nn.Module:
    """``model`` itself, the weights of its layers in ``stored``, its layers casting."""
    for module in model.modules():
        if type(module) in CASTING:
            module.__class__ = CASTING[type(module)]
            module.to(stored)
    return model
