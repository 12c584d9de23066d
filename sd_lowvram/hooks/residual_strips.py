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

from ..errors import NoSiteError
from ..memory.repeats import representative_pieces
from ..models.anatomy import Anatomy, Residual, layer
from ..models.interfaces import MapConvolution
from ..patches import Patch, wrap
from ..settings import Settings
from ..streaming.weight_scopes import hold_weights
from ..weights import needs_graph
from .arguments import time_and_more
from .offers import Offer, OfferKind, Target
from .strips import Span, Statistics, assemble, spans

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
    pieces = spans(x.shape[2], strips, FEWEST_ROWS)
    parts = None if len(pieces) == 1 or needs_graph(block, x, time) else look(block, *more)
    if parts is None:
        return original(x, *args, **kw)
    before = Statistics(parts.norm1)
    for start, stop in representative_pieces(pieces, x):
        before.add(x.narrow(2, start, stop - start))
    shift = parts.shift(time)
    hidden, after = _first_half(parts, x, shift, pieces, before)
    return _second_half(parts, x, hidden, pieces, after)


def _first_half(
    block: Residual, x: Tensor, shift: Tensor | None, pieces: list[Span], before: Statistics
) -> tuple[Tensor, Statistics]:
    """Return conv1(act(norm1(x))) + shift as a new map (N, C, H, W), and the statistics of its norm2."""
    after = Statistics(block.norm2)
    rows, facts = _Rows(x, block.conv1), _map_facts(block, block.conv1, x, before, pieces)

    def strip(start: int, stop: int) -> Tensor:
        part = _convolve(block, block.conv1, rows, before, start, stop, facts)
        part = part if shift is None else part + shift.to(part.dtype)
        after.add(part)
        return part

    return assemble(strip, pieces, 2, x), after


def _second_half(block: Residual, x: Tensor, hidden: Tensor, pieces: list[Span], after: Statistics) -> Tensor:
    """Return (shortcut(x) + conv2(act(norm2(hidden)))) / scale. It overwrites ``hidden`` if both have one type and
    width.
    """
    rows, facts = _Rows(hidden, block.conv2), _map_facts(block, block.conv2, hidden, after, pieces)

    def strip(start: int, stop: int) -> Tensor:
        part = _convolve(block, block.conv2, rows, after, start, stop, facts)
        straight = x.narrow(2, start, stop - start)
        part = (straight if block.shortcut is None else block.shortcut(straight)) + part
        return part if block.scale == 1 else part / block.scale

    return assemble(strip, pieces, 2, x, out=hidden)


def _map_facts(
    block: Residual, conv: nn.Module, image: Tensor, statistics: Statistics, pieces: list[Span]
) -> tuple[Tensor, ...]:
    """Summary of act(norm(map)) for a convolution that depends on its whole map; empty for other convolutions."""
    inner = layer(conv)
    if not isinstance(inner, MapConvolution):
        return ()
    with hold_weights():
        cut = (image.narrow(2, start, stop - start) for start, stop in representative_pieces(pieces, image))
        return (inner.over_map(block.act(statistics.normalised(strip)) for strip in cut),)


def _convolve(
    block: Residual,
    conv: nn.Module,
    rows: _Rows,
    statistics: Statistics,
    start: int,
    stop: int,
    facts: tuple[Tensor, ...],
) -> Tensor:
    """Rows ``start`` to ``stop`` of conv(act(norm(map)))."""
    strip, above = rows.with_halo(start, stop)
    strip = statistics.normalised(strip)
    convolved: Tensor = conv(block.act(strip), *facts)
    return convolved.narrow(2, above, stop - start)


class _Rows:
    """Strips of a map with a row of halo above and below, read from top to bottom.

    The map may be overwritten behind the strip that is being computed: the row above the next strip is copied before.
    """

    def __init__(self, image: Tensor, conv: nn.Module) -> None:
        self._image = image
        self._around = layer(conv).padding_mode == "circular"
        self._first = image[:, :, :1].clone() if self._around else None
        self._above = image[:, :, -1:] if self._around else None

    def with_halo(self, start: int, stop: int) -> tuple[Tensor, int]:
        """Return rows ``start`` to ``stop`` with one more on each side, and the number of rows added above.

        At the map's edges no row is added, because the convolution pads there itself; with circular padding the row of
        the opposite edge is added.
        """
        height = self._image.shape[2]
        above = self._image[:, :, max(0, start - 1) : start] if self._above is None else self._above
        pieces = [above, self._image[:, :, start : min(stop + 1, height)]]
        if stop == height and self._first is not None:
            pieces.append(self._first)
        self._above = self._image[:, :, stop - 1 : stop].clone()
        return torch.cat(pieces, 2), above.shape[2]
