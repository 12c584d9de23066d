"""The anatomy of an autoencoder: decoder and encoder as a row of steps, the same for every family.

diffusers' AutoencoderKL, and that of CompVis' latent diffusion with its descendants in ComfyUI and the WebUIs.

Steps hold the host's own layers and what calls them; layers are called, never unpacked, so that what a host does
inside a call (a LoRA, a cast, a fetch from host memory) keeps happening.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .anatomy import Residual, has, is_3x3, is_pointwise, layer


@dataclass(frozen=True)
class Conv:
    """A 3x3 convolution, behind a normalisation and SiLU where ``norm`` is given (the last layer)."""

    conv: nn.Module
    norm: nn.GroupNorm | None = None


@dataclass(frozen=True)
class Attention:
    """Attention of every pixel to every pixel, with its residual. The layers take (N, pixels, channels)."""

    norm: nn.GroupNorm
    to_q: Callable[[Tensor], Tensor]
    to_k: Callable[[Tensor], Tensor]
    to_v: Callable[[Tensor], Tensor]
    to_out: Callable[[Tensor], Tensor]
    heads: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Upsample:
    """Twice the size by repetition, then a 3x3 convolution."""

    conv: nn.Module


@dataclass(frozen=True)
class Downsample:
    """Half the size by a 3x3 convolution of stride 2, padded by one zero at the right and at the bottom."""

    conv: nn.Module


Step = Conv | Residual | Attention | Upsample | Downsample


@dataclass(frozen=True)
class Autoencoder:
    """The steps of decoder and encoder in the order in which they run."""

    decoder: tuple[Step, ...]
    encoder: tuple[Step, ...]


def dissect(vae: Any) -> Autoencoder | None:
    """Return the steps of an AutoencoderKL; None if ``vae`` is built in another way.

    The layers are the current ones: call this at every run, because a LoRA replaces layers.
    """
    decoder, encoder = (_decoder, _encoder) if hasattr(vae.decoder, "up_blocks") else (_ldm_decoder, _ldm_encoder)
    try:
        return Autoencoder(tuple(decoder(vae.decoder)), tuple(encoder(vae.encoder)))
    except (AttributeError, TypeError, ValueError):
        return None


def residual_blocks(vae: Any) -> list[nn.Module]:
    """Residual blocks of an AutoencoderKL; empty for other autoencoders."""
    if vae is None or dissect(vae) is None:
        return []
    return [module for module in vae.modules() if has(module, "norm1", "conv1", "norm2", "conv2")]


def residual(block: Any, *more: Any) -> Residual | None:
    """Parts of an autoencoder's residual block as they are now; None for another kind of block."""
    try:
        return _resnet(block) if hasattr(block, "nonlinearity") else _ldm_resnet(block)
    except (AttributeError, ValueError):
        return None


def _decoder(decoder: Any) -> Iterator[Step]:
    yield Conv(decoder.conv_in)
    yield from _middle(decoder.mid_block)
    for block in decoder.up_blocks:
        yield from _level(block)
        yield from (Upsample(sampler.conv) for sampler in block.upsamplers or ())
    yield _last(decoder)


def _encoder(encoder: Any) -> Iterator[Step]:
    yield Conv(encoder.conv_in)
    for block in encoder.down_blocks:
        yield from _level(block)
        yield from (_downsample(sampler) for sampler in block.downsamplers or ())
    yield from _middle(encoder.mid_block)
    yield _last(encoder)


def _level(block: Any) -> Iterator[Step]:
    if getattr(block, "attentions", None):
        raise ValueError("attention outside the middle")
    yield from map(_resnet, block.resnets)


def _last(part: Any) -> Conv:
    _must_be_silu(part.conv_act)
    return Conv(part.conv_out, part.conv_norm_out)


def _must_be_silu(activation: Any) -> None:
    if not isinstance(activation, nn.SiLU):
        raise ValueError(f"an activation other than SiLU: {activation}")


def _middle(block: Any) -> Iterator[Step]:
    yield _resnet(block.resnets[0])
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        if attention is not None:
            yield _attention(attention)
        yield _resnet(resnet)


def _resnet(block: Any) -> Residual:
    if getattr(block, "upsample", None) or getattr(block, "downsample", None):
        raise ValueError("a residual block that changes the size inside")
    _must_be_silu(block.nonlinearity)
    scale = float(block.output_scale_factor)
    return Residual(block.norm1, block.conv1, block.norm2, block.conv2, shortcut=block.conv_shortcut, scale=scale)


def _attention(block: Any) -> Attention:
    if not block.residual_connection or block.group_norm is None:
        raise ValueError("an attention without residual or normalisation")
    out = block.to_out[0]
    scale = float(block.rescale_output_factor)
    return Attention(block.group_norm, block.to_q, block.to_k, block.to_v, out, int(block.heads), scale)


def _downsample(sampler: Any) -> Downsample:
    if layer(sampler.conv).padding != (0, 0):
        raise ValueError("a downsampler with symmetric padding")
    return Downsample(sampler.conv)


def _ldm_decoder(decoder: Any) -> Iterator[Step]:
    if getattr(decoder, "give_pre_end", False) or getattr(decoder, "tanh_out", False):
        raise ValueError("a decoder that ends otherwise")
    yield Conv(_3x3(decoder.conv_in))
    yield from _ldm_middle(decoder.mid)
    for number, level in reversed(list(enumerate(decoder.up))):
        yield from _ldm_level(level)
        if number:
            yield _ldm_upsample(level.upsample)
    yield Conv(_3x3(decoder.conv_out), decoder.norm_out)


def _ldm_encoder(encoder: Any) -> Iterator[Step]:
    yield Conv(_3x3(encoder.conv_in))
    for number, level in enumerate(encoder.down):
        yield from _ldm_level(level)
        if number < len(encoder.down) - 1:
            yield _ldm_downsample(level.downsample)
    yield from _ldm_middle(encoder.mid)
    yield Conv(_3x3(encoder.conv_out), encoder.norm_out)


def _ldm_level(level: Any) -> Iterator[Step]:
    if len(level.attn):
        raise ValueError("attention outside the middle")
    yield from map(_ldm_resnet, level.block)


def _ldm_middle(middle: Any) -> Iterator[Step]:
    yield _ldm_resnet(middle.block_1)
    if not isinstance(middle.attn_1, nn.Identity):
        yield _ldm_attention(middle.attn_1)
    yield _ldm_resnet(middle.block_2)


def _ldm_resnet(block: Any) -> Residual:
    shortcut = None
    if block.in_channels != block.out_channels:
        shortcut = block.conv_shortcut if block.use_conv_shortcut else block.nin_shortcut
        if not is_pointwise(shortcut):
            raise ValueError("a shortcut that looks at neighbours")
    return Residual(block.norm1, _3x3(block.conv1), block.norm2, _3x3(block.conv2), shortcut=shortcut)


def _ldm_attention(block: Any) -> Attention:
    layers = (block.q, block.k, block.v, block.proj_out)
    if not all(map(is_pointwise, layers)):
        raise ValueError("an attention of another kind")
    query, key, value, out = (functools.partial(_convolve_tokens, conv) for conv in layers)
    return Attention(block.norm, query, key, value, out)


def _convolve_tokens(conv: nn.Module, tokens: Tensor) -> Tensor:
    """A convolution of single pixels, on (N, pixels, C) instead of (N, C, H, W)."""
    result: Tensor = conv(tokens.transpose(1, 2).unsqueeze(3))
    return result.squeeze(3).transpose(1, 2)


def _ldm_upsample(sampler: Any) -> Upsample:
    if not sampler.with_conv or getattr(sampler, "scale_factor", 2.0) != 2.0:
        raise ValueError("an upsampler of another kind")
    return Upsample(_3x3(sampler.conv))


def _ldm_downsample(sampler: Any) -> Downsample:
    conv = layer(sampler.conv) if sampler.with_conv else None
    if conv is None or (conv.kernel_size, conv.stride, conv.padding) != ((3, 3), (2, 2), (0, 0)):
        raise ValueError("a downsampler of another kind")
    return Downsample(sampler.conv)


def _3x3(conv: nn.Module) -> nn.Module:
    if not is_3x3(conv):
        raise ValueError(f"a convolution of another kind: {conv}")
    return conv
