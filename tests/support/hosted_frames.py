"""An autoencoder of frames as ComfyUI holds it, of the layers of diffusers' own: its names, and its convolution, which
from 0.33 on pads what is around a frame in its own call and gives one frame alone the last of its kernel.

Forge Neo's is the same with one name spelt otherwise. Its autoencoder for pictures alone has convolutions of the plane.
"""

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


class HostedPictures(nn.Module):
    """Forge Neo's Qwen2DVAE around the layers of ``vae``: what a single frame meets of them, as layers of the plane."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        vae = copy.deepcopy(vae)
        self.z_dim, self.dim_mult = vae.config.z_dim, vae.config.dim_mult
        self.quant_conv, self.post_quant_conv = _flat(vae.quant_conv), _flat(vae.post_quant_conv)
        ups = [
            Part(resnets=nn.ModuleList(map(_flat, block.resnets)), upsamplers=_samplers(block.upsamplers))
            for block in vae.decoder.up_blocks
        ]
        self.decoder = _plane(vae.decoder, up_blocks=nn.ModuleList(ups))
        self.encoder = _plane(vae.encoder, down_blocks=nn.ModuleList(map(_flat, vae.encoder.down_blocks)))
        self.eval().requires_grad_(False)

    def decode(self, z: Tensor) -> Tensor:
        return self._by_frames(lambda x: self.decoder(self.post_quant_conv(x)).clamp(-1, 1), z)

    def encode(self, x: Tensor) -> Tensor:
        return self._by_frames(lambda x: self.quant_conv(self.encoder(x)).chunk(2, dim=1)[0], x)

    @staticmethod
    def _by_frames(run: Any, x: Tensor) -> Tensor:
        if x.ndim == 4:
            return run(x)
        return run(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (len(x), -1)).transpose(1, 2)


class _Plane(Part):
    """A decoder or an encoder of pictures alone, with its plain forward."""

    def forward(self, x: Tensor) -> Tensor:
        middle = [self.mid_block.resnets[0], self.mid_block.attentions[0], self.mid_block.resnets[1]]
        rows: list[Any] = list(getattr(self, "down_blocks", ()))
        rows += middle
        for block in getattr(self, "up_blocks", ()):
            rows += [*block.resnets, *(block.upsamplers or ())]
        x = self.conv_in(x)
        for block in rows:
            x = _pass(block, x)
        return self.conv_out(F.silu(self.norm_out(x)))


def _pass(block: Any, x: Tensor) -> Tensor:
    if hasattr(block, "resample"):
        return block.resample(x)
    if hasattr(block, "to_qkv"):
        query, key, value = block.to_qkv(block.norm(x)).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value)[:, 0].transpose(1, 2)
        return x + block.proj(mixed.unflatten(2, x.shape[2:]).contiguous())
    within = block.conv1(F.silu(block.norm1(x)))
    return block.conv2(F.silu(block.norm2(within))) + block.conv_shortcut(x)


class _Norm(nn.Module):
    def __init__(self, like: Any) -> None:
        super().__init__()
        self.scale, self.gamma = like.scale, nn.Parameter(like.gamma.detach().reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.scale * self.gamma


def _flat(block: Any) -> nn.Module:
    """A layer or a block as one of the plane."""
    if isinstance(block, nn.Conv3d):
        pads = (block.kernel_size[1] // 2, block.kernel_size[2] // 2)
        conv = nn.Conv2d(block.in_channels, block.out_channels, block.kernel_size[1:], block.stride[1:], pads)
        conv.load_state_dict({"weight": block.weight[:, :, -1], "bias": block.bias})
        return conv
    if hasattr(block, "gamma"):
        return _Norm(block)
    if hasattr(block, "resample"):
        return Part(resample=block.resample)
    if hasattr(block, "to_qkv"):
        return Part(norm=_Norm(block.norm), to_qkv=block.to_qkv, proj=block.proj)
    if isinstance(block, nn.Identity):
        return block
    names = ("norm1", "conv1", "norm2", "conv2", "conv_shortcut")
    return Part(dropout=nn.Dropout(0.0), **{name: _flat(getattr(block, name)) for name in names})


def _samplers(samplers: Any) -> Any:
    return None if samplers is None else nn.ModuleList(map(_flat, samplers))


def _plane(part: Any, **rows: nn.Module) -> _Plane:
    middle = Part(
        resnets=nn.ModuleList(map(_flat, part.mid_block.resnets)),
        attentions=nn.ModuleList(map(_flat, part.mid_block.attentions)),
    )
    ends = {name: _flat(getattr(part, name)) for name in ("conv_in", "norm_out", "conv_out")}
    return _Plane(mid_block=middle, **ends, **rows)
