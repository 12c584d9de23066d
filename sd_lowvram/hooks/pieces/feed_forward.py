"""Feed-forward layers in chunks of tokens.

The hidden map is eight times as wide as the tokens; only one chunk of it exists at a time.

Source: ours for Stable Diffusion; a feed-forward layer computes each token by itself. Fidelity: ``rounding``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import NoSiteError
from ...models.anatomy import Anatomy
from ...patches import Patch, wrap
from ...settings import Settings
from ...weights import needs_graph
from ..offers import Offer, OfferKind, Target
from .strips import assemble, equal_spans

FEWEST_TOKENS = 256
"""Fewest rows of a chunk: with fewer, a matrix product is slow."""


def feed_forward(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's feed-forward layers over ``settings.feed_forward_chunks`` chunks of tokens (N, tokens, C).

    Args:
        anatomy: its feed-forward layers are patched.
        settings: ``feed_forward_chunks`` is the number of chunks.
        device: unused.

    Yields:
        One patch of ``forward`` for each layer.

    Raises:
        NoSiteError: the target has no feed-forward layer.
    """
    if not anatomy.feed_forwards:
        raise NoSiteError("feed forward: the model has no feed-forward layer")
    chunks = settings.feed_forward_chunks or 1
    for site in anatomy.feed_forwards:
        yield wrap(site.module, "forward", functools.partial(_run_in_chunks, site.module, chunks), "feed_forward")


def offers(target: Target) -> Iterator[Offer]:
    """Offer 4, 8 and 16 chunks at levels 1, 4 and 5, and 2 chunks late at level 3."""
    if target.anatomy.feed_forwards:
        for level, parts in {1: 4, 4: 8, 5: 16}.items():
            yield Offer(OfferKind.LADDER, {"feed_forward_chunks": parts}, level=level, stages=("denoise",))
        # Weights that do not fit the buffer together are copied again for each chunk.
        yield Offer(OfferKind.LATE, {"feed_forward_chunks": 2}, level=3, stages=("denoise",))


def _run_in_chunks(
    module: nn.Module, chunks: int, original: Callable[..., Tensor], tokens: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    pieces = equal_spans(tokens.shape[-2], chunks, FEWEST_TOKENS)
    if len(pieces) == 1 or needs_graph(module, tokens):
        return original(tokens, *args, **kwargs)
    return assemble(lambda start, stop: original(tokens[..., start:stop, :], *args, **kwargs), pieces, -2, tokens)
