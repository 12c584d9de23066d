"""Attention in regions by bands: whole rows of regions, of which nobody sees another.

What all see is the pooled map. Its tokens are the means of the normed ones, whose keys and values are the means of the
keys and values, so that none of these are there for longer than a band.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from ..models.anatomy import AttentionInRegions
from ..models.regional_attention import POOLED, Band, pooled_map, region_sizes
from ..streaming.weight_scopes import kept
from .strips import Span, assembled, spans


def in_bands(parts: AttentionInRegions, tokens: Tensor, most: int) -> Tensor:
    """tokens + attention(norm(tokens)) of tokens (N, height * width, C), in up to ``most`` bands. A new tensor."""
    attention, norm = parts.attention, parts.norm
    height, width = attention.sides(tokens.shape[1])
    sizes = region_sizes(height, attention.side)
    edges = [0, *itertools.accumulate(sizes)]
    bands = {
        (edges[first] * width, edges[last] * width): sizes[first:last] for first, last in spans(len(sizes), most, 1)
    }
    with kept():
        pooled = _pooled(parts, tokens, height, width)
        keys, values = attention.to_k(pooled), attention.to_v(pooled)

        def attended(start: int, stop: int) -> Tensor:
            part = tokens[:, start:stop]
            result: Tensor = attention(norm(part), band=Band(bands[start, stop], keys, values))
            return result + part

        return assembled(attended, [*bands], 1, tokens)


def _pooled(parts: AttentionInRegions, tokens: Tensor, height: int, width: int) -> Tensor:
    """The pooled map's tokens (N, tokens, C) of norm(tokens), one of its rows after the other."""
    rows = min(POOLED, height)

    def row(first: int, last: int) -> Tensor:
        start, stop = first * height // rows, -(-last * height // rows)
        normed: Tensor = parts.norm(tokens[:, start * width : stop * width])
        return pooled_map(normed.unflatten(1, (-1, width)), 1)

    columns = min(POOLED, width)
    pieces: list[Span] = [(first * columns, (first + 1) * columns) for first in range(rows)]
    return assembled(lambda start, stop: row(start // columns, stop // columns), pieces, 1, tokens)
