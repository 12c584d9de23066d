"""The anatomy of an autoencoder: decoder and encoder as a row of steps, the same for every family.

Steps hold the host's own layers and the verbs to use them; layers are called, never unpacked, so that what a host does
inside a call (a LoRA, a cast, a fetch from host memory) keeps happening.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Conv:
    """A 3x3 convolution, behind a normalisation and SiLU where ``norm`` is given (the last layer)."""

    conv: nn.Module
    norm: nn.GroupNorm | None = None


@dataclass(frozen=True)
class ResBlock:
    """``(shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))) / scale``."""

    norm1: nn.GroupNorm
    conv1: nn.Module
    norm2: nn.GroupNorm
    conv2: nn.Module
    shortcut: nn.Module | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Attention of every pixel to every pixel, with its residual. The layers take (N, pixels, channels)."""

    norm: nn.GroupNorm
    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    to_out: nn.Module
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


Step = Conv | ResBlock | Attention | Upsample | Downsample


@dataclass(frozen=True)
class Autoencoder:
    """The steps of decoder and encoder in the order in which they run."""

    decoder: tuple[Step, ...]
    encoder: tuple[Step, ...]


def dissect(vae: Any) -> Autoencoder | None:
    """The steps of a diffusers AutoencoderKL; None when ``vae`` is built otherwise.

    The layers are those that it has now: ask again at every run, because a LoRA puts others in their place.
    """
    try:
        return Autoencoder(tuple(_decoder(vae.decoder)), tuple(_encoder(vae.encoder)))
    except (AttributeError, TypeError, ValueError):
        return None


def _decoder(decoder: Any) -> Iterator[Step]:
    yield Conv(decoder.conv_in)
    yield from _middle(decoder.mid_block)
    for block in decoder.up_blocks:
        yield from map(_resnet, block.resnets)
        yield from (Upsample(sampler.conv) for sampler in block.upsamplers or ())
    yield _last(decoder)


def _encoder(encoder: Any) -> Iterator[Step]:
    yield Conv(encoder.conv_in)
    for block in encoder.down_blocks:
        yield from map(_resnet, block.resnets)
        yield from (_downsample(sampler) for sampler in block.downsamplers or ())
    yield from _middle(encoder.mid_block)
    yield _last(encoder)


def _last(part: Any) -> Conv:
    _must_be_silu(part.conv_act)
    return Conv(part.conv_out, part.conv_norm_out)


def _must_be_silu(activation: Any) -> None:
    if not isinstance(activation, nn.SiLU):
        raise ValueError(f"an activation other than SiLU: {activation}")


def layer(conv: nn.Module) -> Any:
    """The convolution itself where a LoRA is wrapped around it: to look at, not to call."""
    return getattr(conv, "base_layer", conv)


def _middle(block: Any) -> Iterator[Step]:
    yield _resnet(block.resnets[0])
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        if attention is not None:
            yield _attention(attention)
        yield _resnet(resnet)


def _resnet(block: Any) -> ResBlock:
    if getattr(block, "upsample", None) or getattr(block, "downsample", None):
        raise ValueError("a residual block that changes the size inside")
    _must_be_silu(block.nonlinearity)
    return ResBlock(
        block.norm1, block.conv1, block.norm2, block.conv2, block.conv_shortcut, float(block.output_scale_factor)
    )


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
