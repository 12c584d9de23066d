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
        """Summarise the whole map, for calls on its strips.

        Args:
            strips: (N, C, rows, W), in order.
        """


@runtime_checkable
class MapAttention(Protocol):
    """A self-attention that depends on where tokens are in the map.

    No token may be left out, its processor (None) must not be exchanged, and it takes no mask. It runs over some of the
    tokens at a time by :meth:`in_chunks`.
    """

    def in_chunks(self, norm: nn.Module, tokens: Tensor, chunks: int) -> Tensor:
        """Return ``tokens + self(norm(tokens))`` as a new tensor, computed in up to ``chunks`` parts.

        Args:
            norm: the norm before the attention.
            tokens: (N, tokens, C).
            chunks: number of parts.
        """
