"""Fast tiles: independent overlapping tiles of the picture, blended where they overlap.

Every tile is normalised by its own statistics, so colours shift a little: ``approximate``. Source: VAE tiling in
diffusers; the ramps are ours and sum to one in both directions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import progress
from ..errors import NoSiteError
from ..models.anatomy import Anatomy
from ..models.causal_autoencoder import sees_frames
from ..patches import Patch
from ..settings import Settings

TILE, OVERLAP = 64, 16
"""Side of a tile and of what two neighbours share, in latent pixels: 512 and 128 pixels of the picture."""


def vae_fast(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Decode and encode by blended tiles; what fits in one tile is not tiled.

    Args:
        anatomy: its autoencoder is patched.
        settings, device: not read.

    Yields:
        One patch of ``forward`` for the decoder and one for the encoder.

    Raises:
        NoSiteError: the target has no autoencoder, or one that decodes several frames together.
    """
    vae: Any = anatomy.vae
    if vae is None:
        raise NoSiteError("fast tiles: the target has no autoencoder")
    if sees_frames(vae):
        raise NoSiteError(
            f"fast tiles: {type(vae).__name__} sees frames; exact tiles decode it as fast (vae_tiles='exact')"
        )
    widths = anatomy.config(anatomy.autoencoder or "").get("block_out_channels", (0,) * 4)
    factor = 2 ** (len(widths) - 1)
    for part, up, down, stage in ((vae.decoder, factor, 1, "decode"), (vae.encoder, 1, factor, "encode")):
        around = functools.partial(_run_tiled, up=up, down=down, stage=stage)
        yield Patch(part, "forward", functools.partial(functools.partial, around), exclusive=True, hook="vae_fast")


def _run_tiled(
    original: Callable[..., Tensor], x: Tensor, *args: Any, up: int, down: int, stage: str, **kwargs: Any
) -> Tensor:
    if max(x.shape[2:]) <= TILE * down:
        return original(x, *args, **kwargs)
    return blend(lambda tile: original(tile, *args, **kwargs), x, TILE * down, OVERLAP * down, up, down, stage)


def blend(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    tile: int,
    overlap: int,
    up: int = 1,
    down: int = 1,
    stage: str = "decode",
) -> Tensor:
    """``run`` over tiles of ``x`` (N, C, H, W), blended linearly.

    Args:
        run: function from a tile (N, C, h, w) to its result (N, C', h * up // down, w * up // down).
        x: the whole map.
        tile, overlap: in pixels of ``x``, multiples of ``down``; ``overlap`` less than ``tile``.
        up, down: ``run`` makes its input so many times larger or smaller.
        stage: "decode" or "encode", for reports of progress.

    Returns:
        (N, C', H * up // down, W * up // down).
    """
    sides = []
    for size in x.shape[2:]:
        places = starts(size, tile, overlap)
        parts = shares([place * up // down for place in places], min(tile, size) * up // down, size * up // down)
        sides.append(list(zip(places, parts, strict=True)))
    result, total = None, len(sides[0]) * len(sides[1])
    for number, ((top, tall), (left, wide)) in enumerate(itertools.product(*sides)):
        piece = run(x[:, :, top : top + tile, left : left + tile])
        weighted = piece * tall.to(piece)[:, None] * wide.to(piece)
        if result is None:
            result = piece.new_zeros((*piece.shape[:2], *(size * up // down for size in x.shape[2:])))
        y0, x0 = top * up // down, left * up // down
        result[:, :, y0 : y0 + piece.shape[2], x0 : x0 + piece.shape[3]] += weighted
        progress.report(stage, number + 1, total)
    assert result is not None
    return result


def starts(size: int, tile: int, overlap: int) -> list[int]:
    """Starts of tiles that cover ``size``; neighbours share ``overlap``, the last two possibly more.

    Args:
        size: length to cover.
        tile: length of a tile.
        overlap: length that two neighbours share.

    Returns:
        First positions, ascending; [0] if one tile is enough.
    """
    if size <= tile:
        return [0]
    return [*range(0, size - tile, tile - overlap), size - tile]


def shares(places: list[int], size: int, total: int) -> list[Tensor]:
    """Blending weights of each tile along one side; at every pixel the weights of all tiles sum to one.

    Args:
        places: starts of the tiles, each ``size`` long, that cover ``total``.
        size: length of a tile.
        total: length of the side.

    Returns:
        (size,) in float64 for each tile.
    """
    heights = torch.zeros(total, dtype=torch.float64)
    position = torch.arange(size, dtype=torch.float64) + 0.5
    tents = []
    for place in places:
        rising = position if place else torch.full_like(position, size)
        tents.append(torch.minimum(rising, size - position) if place + size < total else rising)
        heights[place : place + size] += tents[-1]
    return [tent / heights[place : place + size] for place, tent in zip(places, tents, strict=True)]
