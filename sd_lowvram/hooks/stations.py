"""The modules of a UNet between which its maps travel, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_KINDS = ("resnets", "attentions", "downsamplers", "upsamplers")


def stations(unet: Any) -> list[nn.Module]:
    """Residual blocks, transformers and samplers: each takes a map (N, C, H, W) and makes one."""
    return [module for block in _blocks(unet) for kind in _KINDS for module in _all(block, kind)]


def skip_makers(unet: Any) -> list[nn.Module]:
    """The stations whose maps become skip connections, the first convolution among them."""
    makers = [unet.conv_in]
    for block in unet.down_blocks:
        last = "attentions" if any(True for _ in _all(block, "attentions")) else "resnets"
        makers += [*_all(block, last), *_all(block, "downsamplers")]
    return makers


def _blocks(unet: Any) -> Iterator[Any]:
    yield from unet.down_blocks
    if unet.mid_block is not None:
        yield unet.mid_block
    yield from unet.up_blocks


def _all(block: Any, kind: str) -> Iterator[nn.Module]:
    yield from (module for module in getattr(block, kind, None) or () if module is not None)
