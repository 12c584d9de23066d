"""Self-attention whose cost grows with the pixels and not with their square: inside regions, and to a pooled map.

A-SDM (2023) names such an attention, global-regional interactive, and its aim; the construction is ours. The layers are
those of the attention whose place it takes, so that trained weights go on.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConflictError
from ..hooks.pieces.strips import Span, assemble, equal_spans
from ..streaming.weight_scopes import hold_weights

POOLED = 8
"""The pooled map has so many tokens on a side, whatever the size of the map."""


class RegionalAttention(nn.Module):
    """Attention of tokens (N, height * width, C) within their region, and to the map pooled to 8 x 8 tokens.

    The two results are added, the second one times ``gate``, a learned number for each head that starts at zero: with a
    region as large as the map this is plain attention at first. A side that regions do not divide has regions of two
    sizes that differ by one; nothing is padded. Keys and values are pooled, which equals projecting a pooled map.
    """

    processor = None
    """Attribute that diffusers uses to replace an attention's computation; this attention is not replaceable."""

    def __init__(self, attention: Any, side: int, factor: int) -> None:
        """
        Args:
            attention: of diffusers, whose layers are taken.
            side: of a region, in tokens, at most.
            factor: by how much a side of the map is smaller than one of the latents.
        """
        super().__init__()
        self.heads, self.side, self.factor = int(attention.heads), side, factor
        self.upcast_attention = bool(getattr(attention, "upcast_attention", False))
        self.to_q, self.to_k, self.to_v = attention.to_q, attention.to_k, attention.to_v
        self.to_out = attention.to_out
        self.gate = nn.Parameter(torch.zeros(self.heads))
        self.latents: tuple[int, int] | None = None
        """Height and width of the latents of the UNet's current call, set by the UNet."""

    def forward(
        self, tokens: Tensor, *context: Any, attention_mask: Tensor | None = None, band: Band | None = None, **_: Any
    ) -> Tensor:
        """
        Args:
            band: what ``tokens`` are, where they are only some of the map's rows.

        Raises:
            ConflictError: a mask, or other tokens than the map has.
        """
        if attention_mask is not None:
            raise ConflictError("regional attention takes no attention mask: call the UNet without one")
        if band is None:
            height, width = self.sides(tokens.shape[1])
            rows = region_sizes(height, self.side)
        else:
            rows, width = band.rows, tokens.shape[1] // sum(band.rows)
        query, key, value = (layer(tokens).unflatten(1, (-1, width)) for layer in (self.to_q, self.to_k, self.to_v))
        pooled = (band.keys, band.values) if band is not None else (pooled_map(key), pooled_map(value))
        attended = self._inside_regions(rows, query, key, value)
        del key, value
        attended = attended + self._attend_pooled(query, *pooled)
        del query
        for layer in self.to_out:
            attended = layer(attended)
        return attended

    def in_chunks(self, norm: nn.Module, tokens: Tensor, chunks: int) -> Tensor:
        """tokens + self(norm(tokens)) of tokens (N, height * width, C), in up to so many bands: whole rows of regions,
        of which nobody sees another.

        What all see is the pooled map. Its tokens are the means of the normed ones, whose keys and values are the means
        of the keys and values, so that none of these are there for longer than a band.
        """
        height, width = self.sides(tokens.shape[1])
        sizes = region_sizes(height, self.side)
        edges = [width * row for row in (0, *itertools.accumulate(sizes))]
        bands = {(edges[first], edges[last]): sizes[first:last] for first, last in equal_spans(len(sizes), chunks, 1)}
        with hold_weights():
            pooled = _pool(norm, tokens, height, width)
            keys, values = self.to_k(pooled), self.to_v(pooled)

            def attend_band(start: int, stop: int) -> Tensor:
                part = tokens[:, start:stop]
                result: Tensor = self(norm(part), band=Band(bands[start, stop], keys, values))
                return result + part

            return assemble(attend_band, [*bands], 1, tokens)

    def sides(self, tokens: int) -> tuple[int, int]:
        """Height and width of the map, which must have so many ``tokens``."""
        height, width = (-(-side // self.factor) for side in self.latents or (0, 0))
        if height * width != tokens:
            raise ConflictError(
                f"regional attention was given {tokens} tokens where the map has {height} x {width}: merge no tokens, "
                "and call the UNet and not its blocks"
            )
        return height, width

    def _inside_regions(self, rows: list[int], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(N, height * width, C) of maps (N, height, width, C), whose regions are of the heights ``rows``."""
        columns = region_sizes(query.shape[2], self.side)
        alike = [*itertools.product(runs(rows), runs(columns))]
        if len(alike) == 1:
            return self._attend_regions(*alike[0], query, key, value).flatten(1, 2)
        out = torch.empty_like(query)
        for down, across in alike:
            part = self._attend_regions(down, across, query, key, value)
            out[:, down.start : down.stop, across.start : across.stop] = part
        return out.flatten(1, 2)

    def _attend_regions(self, rows: RegionRow, columns: RegionRow, *maps: Tensor) -> Tensor:
        """Attend within a rectangle of regions of one size; return the results in their places."""
        query, key, value = (self._regions(tensor, rows, columns) for tensor in maps)
        attended = F.scaled_dot_product_attention(query, key, value)
        attended = attended.view(-1, rows.number, columns.number, self.heads, rows.size, columns.size, query.shape[-1])
        return attended.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, rows.total, columns.total, maps[0].shape[-1])

    def _regions(self, whole: Tensor, rows: RegionRow, columns: RegionRow) -> Tensor:
        """(N * regions, heads, tokens of a region, width) of a map (N, height, width, C)."""
        part = whole[:, rows.start : rows.stop, columns.start : columns.stop]
        part = part.reshape(len(part), rows.number, rows.size, columns.number, columns.size, self.heads, -1)
        part = part.permute(0, 1, 3, 5, 2, 4, 6)
        return part.reshape(-1, self.heads, rows.size * columns.size, part.shape[-1])

    def _attend_pooled(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(N, height * width, C): all tokens attend to those of the pooled map (N, tokens, C); times the gate."""
        attended = F.scaled_dot_product_attention(
            self._heads(query.flatten(1, 2)), self._heads(keys), self._heads(values)
        )
        gated: Tensor = attended * self.gate.view(-1, 1, 1)
        return gated.transpose(1, 2).flatten(2)

    def _heads(self, tokens: Tensor) -> Tensor:
        heads: Tensor = tokens.unflatten(2, (self.heads, -1))
        return heads.transpose(1, 2)


class Band(NamedTuple):
    """Whole rows of regions, one below the other, and what the map pools to.

    Attributes:
        rows: the heights of these regions.
        keys, values: of the pooled map (N, tokens, C).
    """

    rows: list[int]
    keys: Tensor
    values: Tensor


def pooled_map(whole: Tensor, height: int = POOLED) -> Tensor:
    """Return the tokens (N, at most height * 8, C) of a pooled map.

    Args:
        whole: (N, height, width, C).
        height: largest height of the pooled map.
    """
    sides = min(height, whole.shape[1]), min(POOLED, whole.shape[2])
    pooled: Tensor = F.adaptive_avg_pool2d(whole.permute(0, 3, 1, 2), sides)
    return pooled.flatten(2).transpose(1, 2)


def _pool(norm: nn.Module, tokens: Tensor, height: int, width: int) -> Tensor:
    """The pooled map's tokens (N, tokens, C) of norm(tokens), one of its rows after the other."""
    rows = min(POOLED, height)

    def row(first: int, last: int) -> Tensor:
        start, stop = first * height // rows, -(-last * height // rows)
        normed: Tensor = norm(tokens[:, start * width : stop * width])
        return pooled_map(normed.unflatten(1, (-1, width)), 1)

    columns = min(POOLED, width)
    pieces: list[Span] = [(first * columns, (first + 1) * columns) for first in range(rows)]
    return assemble(lambda start, stop: row(start // columns, stop // columns), pieces, 1, tokens)


class RegionRow(NamedTuple):
    """Neighbouring regions of one size along a side of a map: from where on, how many, of how many tokens each."""

    start: int
    number: int
    size: int

    @property
    def total(self) -> int:
        return self.number * self.size

    @property
    def stop(self) -> int:
        return self.start + self.total


def region_sizes(total: int, side: int) -> list[int]:
    """Divide ``total`` tokens into the fewest regions of at most ``side`` tokens, as even as possible, the larger ones
    first.
    """
    number = -(-total // side)
    size, larger = divmod(total, number)
    return [size + 1] * larger + [size] * (number - larger)


def runs(sizes: list[int]) -> list[RegionRow]:
    """Regions of ``sizes`` with neighbours of one size together."""
    rows: list[RegionRow] = []
    for size, alike in itertools.groupby(sizes):
        rows.append(RegionRow(rows[-1].stop if rows else 0, len([*alike]), size))
    return rows
