"""The anatomy of the autoencoders of Qwen-Image and of Wan (2.1 and 2.2): decoder and encoder as a row of steps.

As diffusers, ComfyUI and Forge Neo have them. They see frames (N, C, frames, H, W). Every normalisation is of single
pixels, every convolution looks at neighbours and at the two frames before, and only the attention in the middle sees a
whole frame. Qwen-Image 2.1's, and one of Forge Neo's, are for pictures alone: their convolutions look at neighbours
only.

As in :mod:`.autoencoder`, steps hold the host's own layers, which are called and never unpacked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .anatomy import has, is_3x3, layer

FRAMES = 4
"""Frames of a video to one of the latents; the first frame has one for itself."""


@dataclass(frozen=True)
class CausalConv:
    """A 3x3x3 convolution that sees no later frame, or a 3x3 one of a picture; behind ``norm`` and SiLU where given."""

    conv: nn.Module
    norm: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class CausalResidual:
    """``second(first(x)) + shortcut(x)``; the shortcut sees single pixels."""

    first: CausalConv
    second: CausalConv
    shortcut: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FrameAttention:
    """``x + proj(attention(to_qkv(norm(x))))`` of every pixel of a frame (N, C, H, W) to every pixel of it."""

    norm: nn.Module
    to_qkv: nn.Module
    proj: nn.Module


@dataclass(frozen=True)
class Enlarge:
    """Twice the height and width by repetition, then a 3x3 convolution of each frame.

    Attributes:
        time: before that makes two frames of each but the first, as channels one behind the other.
    """

    repeat: nn.Module
    conv: nn.Module
    time: nn.Module | None


@dataclass(frozen=True)
class Reduce:
    """Half the height and width by a 3x3 convolution of stride 2, padded by one zero at the right and at the bottom.

    Attributes:
        time: after that makes one frame of two and the one before; the very first is left as it is.
    """

    conv: nn.Module
    time: nn.Module | None


@dataclass(frozen=True)
class Level:
    """``steps(x) + shortcut(x)``, whose shortcut computes every pixel from pixels at the same place.

    Attributes:
        shortcut: a function of the map, and of True for the first frames.
    """

    steps: tuple[CausalStep, ...]
    shortcut: Callable[[Tensor, bool], Tensor]


CausalStep = CausalConv | CausalResidual | FrameAttention | Enlarge | Reduce | Level


@dataclass(frozen=True)
class CausalAutoencoder:
    """The steps of decoder and encoder in the order in which they run."""

    decoder: tuple[CausalStep, ...]
    encoder: tuple[CausalStep, ...]


def flatten_steps(steps: Sequence[CausalStep]) -> Iterator[CausalStep]:
    """The steps in their order, those of a level one by one."""
    for step in steps:
        yield from flatten_steps(step.steps) if isinstance(step, Level) else [step]


def convolutions(step: CausalStep) -> list[nn.Module]:
    """The convolutions of a step, no level, that look at neighbours."""
    if isinstance(step, CausalResidual):
        return [step.first.conv, step.second.conv]
    return [step.conv] if isinstance(step, CausalConv | Enlarge | Reduce) else []


def sees_frames(vae: Any) -> bool:
    """True for an autoencoder of Qwen-Image or Wan that takes frames, whatever its layers."""
    reduces = any(hasattr(vae, name) for name in _REDUCES_TIME)
    return reduces and has(vae, "encoder", "decoder") and (has(vae, "post_quant_conv") or is_hosted(vae))


_REDUCES_TIME = ("temperal_downsample", "temporal_downsample")
"""The attribute as diffusers and ComfyUI spell it, and as Forge Neo does."""


def sees_pictures(vae: Any) -> bool:
    """True for Forge Neo's autoencoder of Qwen-Image for pictures alone, whatever its layers."""
    return not sees_frames(vae) and has(vae, "encoder", "decoder", "quant_conv", "post_quant_conv", "dim_mult")


def takes_one_frame(vae: Any) -> bool:
    """True if such an autoencoder of diffusers refuses further frames, as Qwen-Image 2.1's."""
    return isinstance(layer(vae.decoder.conv_in), nn.Conv2d)


def is_hosted(vae: Any) -> bool:
    """True if such an autoencoder is ComfyUI's or Forge Neo's: it decodes all frames unchanged and encodes to means."""
    return has(vae, "conv1", "conv2")


def hosted_patch(vae: Any) -> int:
    """Side of the squares of pixels that ComfyUI's takes as channels: 2 of Wan 2.2."""
    return 2 if any(hasattr(block, "avg_shortcut") for block in vae.decoder.upsamples) else 1


def is_causal(vae: Any) -> bool:
    """True if it consists of such steps."""
    return (sees_frames(vae) or sees_pictures(vae)) and dissect_causal(vae) is not None


def dissect_causal(vae: Any) -> CausalAutoencoder | None:
    """The steps of such an autoencoder; None when ``vae`` is built otherwise."""
    decoder, encoder = (_hosted_steps, _hosted_steps) if is_hosted(vae) else (_decoder, _encoder)
    if sees_pictures(vae):
        decoder, encoder = _picture_steps, _picture_steps
    try:
        return CausalAutoencoder(tuple(decoder(vae.decoder)), tuple(encoder(vae.encoder)))
    except (AttributeError, TypeError, ValueError):
        return None


def _decoder(decoder: Any) -> Iterator[CausalStep]:
    yield CausalConv(_3x3x3(decoder.conv_in))
    yield from _middle(decoder.mid_block)
    for block in decoder.up_blocks:
        samplers = block.upsamplers if hasattr(block, "upsamplers") else [block.upsampler]
        steps = (
            *map(_residual, block.resnets),
            *(_resample(sampler) for sampler in samplers or () if sampler is not None),
        )
        shortcut = getattr(block, "avg_shortcut", None)
        if shortcut is None:
            yield from steps
        else:
            yield Level(steps, functools.partial(_enlarge, shortcut))
    yield _last(decoder)


def _encoder(encoder: Any) -> Iterator[CausalStep]:
    yield CausalConv(_3x3x3(encoder.conv_in))
    for block in encoder.down_blocks:
        if hasattr(block, "avg_shortcut"):
            samplers = [block.downsampler] if block.downsampler is not None else []
            steps = (*map(_residual, block.resnets), *map(_resample, samplers))
            yield Level(steps, functools.partial(_average, block.avg_shortcut))
        else:
            yield _resample(block) if hasattr(block, "resample") else _residual(block)
    yield from _middle(encoder.mid_block)
    yield _last(encoder)


def _hosted_steps(part: Any) -> Iterator[CausalStep]:
    """The steps of a decoder or an encoder of ComfyUI's."""
    rows = (part.middle, part.upsamples) if hasattr(part, "upsamples") else (part.downsamples, part.middle)
    yield CausalConv(_3x3x3(part.conv1))
    for block in itertools.chain(*rows):
        yield from _hosted_block(block)
    norm, activation, conv = part.head
    _must_be_silu(activation)
    yield CausalConv(_3x3x3(conv), _pixel_norm(norm))


def _hosted_block(block: Any) -> Iterator[CausalStep]:
    if hasattr(block, "avg_shortcut"):
        grows = hasattr(block, "upsamples")
        inner = block.upsamples if grows else block.downsamples
        steps = tuple(itertools.chain.from_iterable(map(_hosted_block, inner)))
        around = _enlarge if grows else _average
        whole = block.avg_shortcut is None
        yield from steps if whole else [Level(steps, functools.partial(around, block.avg_shortcut))]
    elif hasattr(block, "to_qkv"):
        yield FrameAttention(_pixel_norm(block.norm), block.to_qkv, block.proj)
    elif hasattr(block, "residual"):
        norm1, act1, conv1, norm2, act2, dropout, conv2 = block.residual
        for activation in (act1, act2):
            _must_be_silu(activation)
        _must_keep_values(block, dropout)
        first = CausalConv(_3x3x3(conv1), _pixel_norm(norm1))
        yield CausalResidual(first, CausalConv(_3x3x3(conv2), _pixel_norm(norm2)), block.shortcut)
    else:
        yield _resample(block)


def _picture_steps(part: Any) -> Iterator[CausalStep]:
    """The steps of a decoder or an encoder for pictures alone."""
    yield CausalConv(_3x3(part.conv_in))
    if hasattr(part, "up_blocks"):
        yield from _picture_middle(part.mid_block)
        for block in part.up_blocks:
            yield from map(_picture_block, (*block.resnets, *(block.upsamplers or ())))
    else:
        yield from map(_picture_block, part.down_blocks)
        yield from _picture_middle(part.mid_block)
    yield CausalConv(_3x3(part.conv_out), _of_picture(part.norm_out))


def _picture_middle(middle: Any) -> Iterator[CausalStep]:
    yield _picture_block(middle.resnets[0])
    for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
        yield _picture_block(attention)
        yield _picture_block(resnet)


def _picture_block(block: Any) -> CausalStep:
    if hasattr(block, "to_qkv"):
        return FrameAttention(block.norm, block.to_qkv, block.proj)
    if hasattr(block, "resample"):
        resize, conv = block.resample
        grows = hasattr(resize, "scale_factor")
        if layer(conv).kernel_size != (3, 3) or (grows and resize.scale_factor != (2.0, 2.0)):
            raise ValueError(f"a sampler of another kind: {block}")
        if not grows and (resize.padding != (0, 1, 0, 1) or layer(conv).stride != (2, 2)):
            raise ValueError(f"a sampler of another kind: {block}")
        return Enlarge(resize, conv, None) if grows else Reduce(conv, None)
    _must_keep_values(block, block.dropout)
    first, second = CausalConv(_3x3(block.conv1), _of_picture(block.norm1)), _3x3(block.conv2)
    return CausalResidual(first, CausalConv(second, _of_picture(block.norm2)), _of_picture(block.conv_shortcut))


def _of_picture(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A layer of (N, C, H, W) as a function of one frame (N, C, 1, H, W)."""

    def run(x: Tensor) -> Tensor:
        result: Tensor = module(x.squeeze(2))
        return result.unsqueeze(2)

    return run


def _3x3(conv: nn.Module) -> nn.Module:
    if not is_3x3(conv) or layer(conv).padding_mode != "zeros":
        raise ValueError(f"a convolution of another kind: {conv}")
    return conv


def _enlarge(shortcut: nn.Module, x: Tensor, first: bool) -> Tensor:
    result: Tensor = shortcut(x, first_chunk=first)
    return result


def _average(shortcut: nn.Module, x: Tensor, first: bool) -> Tensor:
    result: Tensor = shortcut(x)
    return result


def _last(part: Any) -> CausalConv:
    _must_be_silu(part.nonlinearity)
    return CausalConv(_3x3x3(part.conv_out), _pixel_norm(part.norm_out))


def _middle(block: Any) -> Iterator[CausalStep]:
    yield _residual(block.resnets[0])
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        yield FrameAttention(_pixel_norm(attention.norm), attention.to_qkv, attention.proj)
        yield _residual(resnet)


def _residual(block: Any) -> CausalResidual:
    _must_be_silu(block.nonlinearity)
    _must_keep_values(block, block.dropout)
    first = CausalConv(_3x3x3(block.conv1), _pixel_norm(block.norm1))
    return CausalResidual(first, CausalConv(_3x3x3(block.conv2), _pixel_norm(block.norm2)), block.conv_shortcut)


def _resample(sampler: Any) -> Enlarge | Reduce:
    resize, conv = sampler.resample
    time = sampler.time_conv if sampler.mode.endswith("3d") else None
    if layer(conv).kernel_size != (3, 3) or (time is not None and layer(time).kernel_size not in ((3, 1, 1), (1, 1))):
        raise ValueError("a convolution of another kind")
    if sampler.mode.startswith("upsample") and resize.scale_factor == (2.0, 2.0):
        return Enlarge(resize, conv, time)
    if sampler.mode.startswith("downsample") and resize.padding == (0, 1, 0, 1) and layer(conv).stride == (2, 2):
        return Reduce(conv, time)
    raise ValueError(f"a sampler of another kind: {sampler.mode}")


def _3x3x3(conv: Any) -> nn.Module:
    inner = layer(conv)
    square = (3,) * len(inner.kernel_size), (1,) * len(inner.stride)
    if (inner._padding, inner.padding) not in _PADDED or (inner.kernel_size, inner.stride) != square:
        raise ValueError(f"a convolution of another kind: {conv}")
    module: nn.Module = conv
    return module


_PADDED = (((1, 1, 1, 1, 2, 0), (0, 0, 0)), (2, (0, 1, 1)), ((1, 1, 1, 1), (0, 0)))
"""Paddings: all sides before the convolution's own call, or the sides of a frame within it (ComfyUI from 0.33 on); all
sides of a picture before it (Qwen-Image 2.1)."""


def _pixel_norm(norm: Any) -> nn.Module:
    """A normalisation of each pixel by its own channels."""
    if not norm.channel_first or norm.gamma.shape[0] != norm.gamma.numel():
        raise ValueError(f"a normalisation of another kind: {norm}")
    module: nn.Module = norm
    return module


def _must_keep_values(block: Any, dropout: Any) -> None:
    if block.training and dropout.p > 0:
        raise ValueError("a block that drops some of its values")


def _must_be_silu(activation: Any) -> None:
    if not isinstance(activation, nn.SiLU):
        raise ValueError(f"an activation other than SiLU: {activation}")
