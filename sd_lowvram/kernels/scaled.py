"""Linear layers whose weights stay in 8 bits as a file holds them, widened when the layer is called."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Types in which files hold such weights."""


def widen_scaled(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Widen a weight of 8 bits by the arithmetic of ComfyUI: fp8 times its scale in ``dtype``, int8 times its scale in
    float32.

    Args:
        stored: (out, in), of a type of ``EIGHT_BITS``.
        scale: one number, or one for each row, (out, 1); None: there is no scale.
        dtype: type of the result.
    """
    if scale is None:
        return stored.to(dtype)
    if stored.dtype == torch.int8:
        return (stored.float() * scale).to(dtype)
    return stored.to(dtype) * scale.to(dtype)


class ScaledLinear(nn.Linear):
    """A linear layer that widens its weight for the time of a call.

    The bytes are held as ``int8``, not as a floating type. Code that asks the model for its type then finds the type in
    which it computes, and T5, which casts inputs to the type of a layer's weight, does not cast to int8. The scale's
    float32 is held as ``int32``, which stays as it is when the model is cast.
    """

    def __init__(self, stored: Tensor, scale: Tensor | None, bias: Tensor | None, computes: torch.dtype) -> None:
        """
        Args:
            stored: the weight (out, in) as the file has it.
            scale: as :func:`widen_scaled` takes it.
            bias: (out,), in the type in which the model computes, or None.
            computes: that type.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = stored.shape
        self.stored_as = stored.dtype
        self.compute_dtype = computes  # asked for by Z-Image, where a weight is of no floating type
        self.weight = nn.Parameter(stored.view(torch.int8), requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.register_buffer("weight_scale", None if scale is None else scale.float().view(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Widen the weight to the type of ``x`` (..., in) and apply it; returns (..., out)."""
        held = self.weight_scale
        scale = held.view(torch.float32) if isinstance(held, Tensor) else None
        weight = widen_scaled(self.weight.view(self.stored_as), scale, x.dtype)
        return functional.linear(x, weight, self.bias)
