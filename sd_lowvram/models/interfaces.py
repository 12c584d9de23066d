"""What is asked of UNets and autoencoders, so that any object of this form may take their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn


class DiffusersUNet(Protocol):
    """A UNet2DConditionModel, or what has its blocks under the same names."""

    conv_in: nn.Module
    down_blocks: Iterable[Any]
    mid_block: Any
    up_blocks: Iterable[Any]
    conv_norm_out: nn.Module | None
    conv_out: nn.Module

    def __call__(self, sample: Tensor, timestep: Tensor, **conditions: Any) -> Any: ...


class CompVisUNet(Protocol):
    """A UNetModel of CompVis' code and its descendants in the hosts."""

    input_blocks: Iterable[Any]
    middle_block: Any
    output_blocks: Iterable[Any]
    out: nn.Module

    def __call__(self, x: Tensor, timesteps: Tensor, **conditions: Any) -> Any: ...


class KLAutoencoder(Protocol):
    """An autoencoder of either family: the levels of its encoder and decoder are told by :mod:`.autoencoder`."""

    encoder: Any
    decoder: Any

    def encode(self, pixels: Tensor) -> Any: ...

    def decode(self, latents: Tensor, **options: Any) -> Any: ...
