"""Residual blocks by strips of rows, with GroupNorm statistics of the whole map.

Three passes over the rows. The first sums norm1's statistics of the input. The second writes conv1(act(norm1(x))) +
time to a new map, and sums norm2's statistics of the strips that it writes. The third overwrites this map, strip by
strip, with shortcut(x) + conv2(act(norm2(map))). So memory holds the block's input, one map of its output's size, and
strips.

A convolution is called on a strip with one row of halo on either side, and the extra rows are cropped. A convolution
that depends on its whole map needs one more pass, which summarises the map.

Source: ours; exact, unlike independent tiles, because statistics are those of the whole map. Fidelity: ``rounding``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import NoSiteError
from ...memory.repeats import representative_pieces
from ...models.anatomy import Anatomy, Residual, layer
from ...models.interfaces import MapConvolution
from ...patches import Patch, wrap
from ...settings import Settings
from ...streaming.weight_scopes import hold_weights
from ...weights import needs_graph
from ..arguments import time_and_more
from ..offers import Offer, OfferKind, Target
from .maps import Map, Overwritten
from .operations import first_half, run_strip, second_half
from .strips import Span, Statistics, assemble, equal_spans

FEWEST_ROWS = 8
"""Fewest rows of a strip; two more are computed for the halo."""


def residual_strips(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's residual blocks over ``settings.residual_strips`` strips of rows (N, C, rows, W).

    Blocks that resample inside or that condition their second norm on time are left alone.

    Args:
        anatomy: its residual blocks are patched.
        settings: ``residual_strips`` is the number of strips.
        device: not read.

    Yields:
        One patch of ``forward`` for each plain block.

    Raises:
        NoSiteError: the target has no residual block of the plain kind.
    """
    look, blocks = anatomy.family.residual, _plain_blocks(anatomy)
    if not blocks:
        raise NoSiteError("residual strips: the model has no plain residual block")
    for block in blocks:
        around = functools.partial(_run_in_strips, look, block, settings.residual_strips or 1)
        yield wrap(block, "forward", around, "residual_strips")


def offers(target: Target) -> Iterator[Offer]:
    """Offer 8 or 16 strips, at levels 4 and 5."""
    if _plain_blocks(target.anatomy):
        for level, parts in {4: 8, 5: 16}.items():
            yield Offer(OfferKind.LADDER, {"residual_strips": parts}, level=level, stages=("denoise",))


def _plain_blocks(anatomy: Anatomy) -> list[nn.Module]:
    look = anatomy.family.residual
    return [site.module for site in anatomy.residual_blocks if look(site.module) is not None]


def _run_in_strips(
    look: Callable[..., Residual | None],
    block: nn.Module,
    strips: int,
    original: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    **kw: Any,
) -> Tensor:
    time, *more = time_and_more(args, kw)
    pieces = equal_spans(x.shape[2], strips, FEWEST_ROWS)
    parts = None if len(pieces) == 1 or needs_graph(block, x, time) else look(block, *more)
    if parts is None:
        return original(x, *args, **kw)
    before = Statistics(parts.norm1)
    for start, stop in representative_pieces(pieces, x):
        before.add(x.narrow(2, start, stop - start))
    hidden, after = _first_pass(parts, x, parts.shift(time), pieces, before)
    return _second_pass(parts, x, hidden, pieces, after)


def _first_pass(
    block: Residual, x: Tensor, shift: Tensor | None, pieces: list[Span], before: Statistics
) -> tuple[Tensor, Statistics]:
    """Return conv1(act(norm1(x))) + shift as a new map (N, C, H, W), and the statistics of its norm2."""
    after, wraps = Statistics(block.norm2), _wraps(block.conv1)
    half = first_half(block, shift, *_map_facts(block, block.conv1, x, before, pieces))

    def strip(start: int, stop: int) -> Tensor:
        part = run_strip([half], [before], (Map(x), None), (start, stop), wraps, of_hidden=True)
        after.add(part)
        return part

    return assemble(strip, pieces, 2, x), after


def _second_pass(block: Residual, x: Tensor, hidden: Tensor, pieces: list[Span], after: Statistics) -> Tensor:
    """Return (shortcut(x) + conv2(act(norm2(hidden)))) / scale. It overwrites ``hidden`` if both have one type and
    width.
    """
    wraps = _wraps(block.conv2)
    half = second_half(block, *_map_facts(block, block.conv2, hidden, after, pieces))
    inside = Overwritten(Map(hidden), 1, wraps)

    def strip(start: int, stop: int) -> Tensor:
        inside.mark_written(start)
        part = run_strip([half], [after], (Map(x), inside), (start, stop), wraps)
        inside.keep(slice(start, stop))
        return part

    return assemble(strip, pieces, 2, x, out=hidden)


def _wraps(conv: nn.Module) -> bool:
    """True if the map's last row borders on its first."""
    return bool(layer(conv).padding_mode == "circular")


def _map_facts(
    block: Residual, conv: nn.Module, image: Tensor, statistics: Statistics, pieces: list[Span]
) -> tuple[Tensor, ...]:
    """Summary of act(norm(map)) for a convolution that depends on its whole map; empty for other convolutions."""
    inner = layer(conv)
    if not isinstance(inner, MapConvolution):
        return ()
    with hold_weights():
        cut = (image.narrow(2, start, stop - start) for start, stop in representative_pieces(pieces, image))
        return (inner.over_map(block.act(statistics.normalise(strip)) for strip in cut),)
