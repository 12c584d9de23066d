"""An autoencoder of frames as ComfyUI holds it, of the layers of diffusers' own: its names, and its convolution, which
from 0.33 on pads what is around a frame in its own call and gives one frame alone the last of its kernel."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HostedConv(nn.Conv3d):
    def __init__(self, like: Any) -> None:
        super().__init__(like.in_channels, like.out_channels, like.kernel_size, like.stride)
        self.load_state_dict(like.state_dict())
        self._padding, self.padding = like._padding[4], (0, like._padding[2], like._padding[0])

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        if cache is None and x.shape[2] == 1:
            return F.conv3d(x, self.weight[:, :, -1:], self.bias, self.stride, self.padding)
        before = [] if cache is None else [cache]
        lacking = max(0, self._padding - sum(one.shape[2] for one in before))
        zeros = x.new_zeros(*x.shape[:2], lacking, *x.shape[3:])
        return self._conv_forward(torch.cat([zeros, *before, x], 2), self.weight, self.bias)


class Part(nn.Module):
    """A decoder, an encoder, or a block of one."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class HostedFrames(nn.Module):
    """ComfyUI's names around the layers of ``vae``; frame by frame it runs in the host alone."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        vae = copy.deepcopy(vae)
        config = vae.config
        self.z_dim, self.dim_mult, self.temperal_downsample = config.z_dim, config.dim_mult, config.temperal_downsample
        self.conv1, self.conv2 = HostedConv(vae.quant_conv), HostedConv(vae.post_quant_conv)
        ups = [one for block in vae.decoder.up_blocks for one in (*block.resnets, *(block.upsamplers or ()))]
        self.decoder = _part(vae.decoder, upsamples=nn.ModuleList(map(_block, ups)))
        self.encoder = _part(vae.encoder, downsamples=nn.ModuleList(map(_block, vae.encoder.down_blocks)))
        self.eval().requires_grad_(False)

    def decode(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def encode(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def _part(part: Any, **rows: nn.Module) -> Part:
    first, second = part.mid_block.resnets
    middle = nn.ModuleList([_block(first), part.mid_block.attentions[0], _block(second)])
    head = nn.Sequential(part.norm_out, nn.SiLU(), HostedConv(part.conv_out))
    return Part(conv1=HostedConv(part.conv_in), middle=middle, head=head, **rows)


def _block(block: Any) -> nn.Module:
    if not hasattr(block, "conv1"):
        return block
    layers = (block.norm1, nn.SiLU(), HostedConv(block.conv1))
    layers += (block.norm2, nn.SiLU(), nn.Dropout(0.0), HostedConv(block.conv2))
    return Part(residual=nn.Sequential(*layers), shortcut=block.conv_shortcut)
