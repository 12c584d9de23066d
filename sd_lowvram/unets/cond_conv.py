"""A 3x3 convolution whose weights are mixed for each picture of several experts', by what the picture's map holds.

The idea is CondConv (Yang et al. 2019); A-SDM (2023) puts such layers into the blocks of a UNet that lost layers
(CLME-CondConv). The router is a pool over the map, a linear layer and softmax. CondConv has a sigmoid; here shares that
add up to one keep the scale that the layers after a trained one know, and one expert is exactly the plain layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CondConv2d(nn.Module):
    """Maps (N, C, H, W) to (N, outputs, H', W') by a kernel of their own for each of the N.

    The experts' kernels lie one after the other in ``weight`` (experts * outputs, C, 3, 3), as those of a convolution
    with so many outputs would: whatever stores, orders or moves weights takes it for one. Their biases are mixed with
    the same shares. Each picture is convolved by itself, which on a CPU gives the bits of one grouped convolution in
    its time; layouts stay, and a batch that is divided keeps its bits.
    """

    stored_by_rows = True

    def __init__(self, inputs: int, outputs: int, experts: int, stride: Any = 1, padding: Any = 1) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.experts = inputs, outputs, experts
        self.kernel_size, self.dilation, self.padding_mode = (3, 3), (1, 1), "zeros"
        self.stride, self.padding = ((both, both) if isinstance(both, int) else both for both in (stride, padding))
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs, 3, 3))
        self.bias = nn.Parameter(torch.empty(experts * outputs))
        self.router_weight = nn.Parameter(torch.zeros(experts, inputs))
        self.router_bias = nn.Parameter(torch.zeros(experts))

    def shares(self, pooled: Tensor) -> Tensor:
        """Shares of the experts (N, experts) for maps with means ``pooled`` (N, C); they sum to one."""
        return F.linear(pooled, self.router_weight, self.router_bias).softmax(dim=1)

    def over_map(self, strips: Iterable[Tensor]) -> Tensor:
        """The means (N, C) of a map whose ``strips`` these are, for a call with one of them."""
        sums, pixels = [], 0
        for strip in strips:
            sums.append(strip.sum((2, 3), dtype=torch.float32))
            pixels += strip.shape[2:].numel()
            dtype = strip.dtype
        mean: Tensor = sum(sums) / pixels  # type: ignore[assignment]
        return mean.to(dtype)

    def forward(self, x: Tensor, pooled: Tensor | None = None) -> Tensor:
        """
        Args:
            pooled: means (N, C) of the whole map, where ``x`` is a strip of it.
        """
        if self.experts == 1:
            return F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
        shares = self.shares(x.mean((2, 3)) if pooled is None else pooled).to(self.weight.dtype)
        kernels = shares @ self.weight.reshape(self.experts, -1)
        biases = shares @ self.bias.reshape(self.experts, -1)
        each = zip(x.split(1), kernels.split(1), biases, strict=True)
        convolved = [
            F.conv2d(strip, kernel.view(self.out_channels, self.in_channels, 3, 3), bias, self.stride, self.padding)
            for strip, kernel, bias in each
        ]
        return torch.cat(convolved) if len(convolved) > 1 else convolved[0]
