"""3x3 convolutions of the autoencoder by Winograd's F(4, 3), with a quarter of the multiplications, on CPUs.

Layers are called unchanged; their calls of torch's conv2d are computed tile by tile, with the kernels of the call. The
kernels are transformed at every call and not stored, so weights may be streamed and changed by LoRAs, and nothing stays
in memory. Narrow layers, small maps, other types than float32 and calls under autocast run as in the model; so do calls
on a GPU, whose libraries choose among such algorithms themselves.

Fidelity: ``rounding``. Source: Winograd 1980; Lavin and Gray 2015.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat import autocast_dtype
from ...errors import NoSiteError
from ...kernels.winograd import SIDE, convolve, transform_weight
from ...models.anatomy import Anatomy
from ...patches import Answered, Patch, wrap
from ...settings import Settings
from ...weights import needs_graph
from ..offers import Offer, OfferKind, Target

_NARROWEST = 64
"""Channels, below which the products save no more than the transforms take."""
_LEAST_TILES = 96
"""Tiles of a map, below which transforming the kernels takes what the products save."""


def winograd(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Compute wide 3x3 convolutions of the target's autoencoder by Winograd's algorithm.

    Args:
        anatomy: convolutions of its autoencoder are patched.
        settings, device: not read.

    Yields:
        One patch of ``forward`` for each wide convolution.

    Raises:
        NoSiteError: the target has no autoencoder, or one without such layers.
    """
    sites = [module for module in (anatomy.vae.modules() if anatomy.vae is not None else ()) if _suits(module)]
    if not sites:
        raise NoSiteError("winograd: the target has no autoencoder with 3x3 convolutions of 64 channels or more")
    for site in sites:
        yield wrap(site, "forward", functools.partial(_run_winograd, site), "winograd")


def offers(target: Target) -> Iterator[Offer]:
    """Offer Winograd's algorithm for every way to run the autoencoder on a CPU, if it was measured to be faster."""
    if target.device.type == "cpu" and target.anatomy.vae is not None and target.is_faster():
        yield Offer(OfferKind.BESIDE, {"winograd": True}, stages=("encode", "decode"))


def _suits(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (3, 3)
        and module.stride == module.dilation == (1, 1)
        and module.groups == 1
        and min(module.in_channels, module.out_channels) >= _NARROWEST
    )


def _run_winograd(layer: nn.Module, original: Callable[..., Tensor], x: Tensor, *args: Any, **kw: Any) -> Tensor:
    if not _takes(x) or needs_graph(layer, x):
        return original(x, *args, **kw)
    with Answered({F.conv2d: _convolution}):
        return original(x, *args, **kw)


def _takes(x: Tensor) -> bool:
    if x.dim() != 4 or x.device.type != "cpu" or x.dtype != torch.float32 or autocast_dtype("cpu") is not None:
        return False
    return x.shape[0] * (x.shape[2] // SIDE) * (x.shape[3] // SIDE) >= _LEAST_TILES


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    plain = weight.shape[2:] == (3, 3) and groups == 1 and padding in (1, (1, 1)) and stride in (1, (1, 1))
    if not plain or input.dtype != torch.float32 or weight.dtype != torch.float32:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return convolve(input, transform_weight(weight), bias)
