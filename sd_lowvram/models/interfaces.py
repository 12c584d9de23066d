"""Protocols of UNets, autoencoders and some layers; any object of this form may take their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

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
    """An autoencoder of either family; :mod:`.autoencoder` finds the levels of its encoder and decoder."""

    encoder: Any
    decoder: Any

    def encode(self, pixels: Tensor) -> Any: ...

    def decode(self, latents: Tensor, **options: Any) -> Any: ...


@runtime_checkable
class MapConvolution(Protocol):
    """A convolution that must know of its whole map, (N, C, H, W), when it is called with a strip of its rows."""

    def over_map(self, strips: Iterable[Tensor]) -> Tensor:
        """Summary of the map for the calls on its strips, from all ``strips`` (N, C, rows, W) in order."""


@runtime_checkable
class MapAttention(Protocol):
    """A self-attention that goes by where tokens lie in the map: none of them may be left out, its processor (None) is
    not to be exchanged, and it says itself how it runs over some of the tokens at a time. It takes no mask."""

    def in_chunks(self, norm: nn.Module, tokens: Tensor, chunks: int) -> Tensor:
        """``tokens + self(norm(tokens))`` of tokens (N, tokens, C), in up to ``chunks`` parts; a new tensor."""
