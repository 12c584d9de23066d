"""Transformer blocks by chunks of tokens: of queries, outputs and norms only a chunk exists at a time.

Keys and values of all tokens are made once, chunk by chunk, and then every chunk of queries runs through the block's
own attention, under the host's own processor, whose projections of keys and values answer with what is there. That
holds for processors in which a query's row does not depend on the other queries; blocks with any other are left alone.
An attention that goes by where tokens lie says itself how it is cut.

Source: ours; chunks of queries are from the self-attention of Rabe and Staats 2021. Fidelity: ``rounding``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import NoSiteError
from ...models.anatomy import Anatomy, AttentionOverMap, TokenAttention, Transformer
from ...patches import Patch, roles_of, set_patch, wrap
from ...settings import Settings
from ...weights import needs_graph
from ..offers import Offer, OfferKind, Target
from . import joint_chunks
from .feed_forward import FEWEST_TOKENS
from .strips import Span, assemble, equal_spans


def transformer_chunks(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's transformer blocks over ``settings.transformer_chunks`` chunks of tokens (N, tokens, C).

    Args:
        anatomy: its transformer blocks, of a UNet or a diffusion transformer, are patched.
        settings: ``transformer_chunks`` is the number of chunks.
        device: not read.

    Yields:
        One patch of ``forward`` for each block.

    Raises:
        NoSiteError: the target has no transformer block.
    """
    # processors may change: blocks are looked at in each call
    ways: list[tuple[Callable[..., Any], Callable[..., Any], nn.Module]]
    ways = [(_run_in_chunks, anatomy.family.transformer, site.module) for site in anatomy.transformer_blocks]
    ways += [(joint_chunks.run_in_chunks, anatomy.family.joint, site.module) for site in anatomy.joint_blocks]
    if not ways:
        raise NoSiteError("transformer chunks: the model has no transformer block")
    for way, look, block in ways:
        around = functools.partial(way, look, block, settings.transformer_chunks or 1)
        yield wrap(block, "forward", around, "transformer_chunks")


def offers(target: Target) -> Iterator[Offer]:
    """Offer 8 or 16 chunks, at levels 4 and 5."""
    if target.anatomy.transformer_blocks or target.anatomy.joint_blocks:
        for level, parts in {4: 8, 5: 16}.items():
            yield Offer(OfferKind.LADDER, {"transformer_chunks": parts}, level=level, stages=("denoise",))


def _run_in_chunks(
    look: Callable[..., Transformer | None],
    block: nn.Module,
    chunks: int,
    original: Callable[..., Tensor],
    tokens: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    pieces = equal_spans(tokens.shape[1], chunks, FEWEST_TOKENS)
    whole = len(pieces) == 1 or needs_graph(block, tokens, args, kwargs) or _merges(block)
    parts = None if whole else look(block, *args, **kwargs)
    if parts is None:
        return original(tokens, *args, **kwargs)
    out: Tensor | None = None
    for attention in parts.attentions:
        if isinstance(attention, AttentionOverMap):
            out = attention.attention.in_chunks(attention.norm, tokens if out is None else out, chunks)
        else:
            out = _attend(attention, tokens if out is None else out, out, pieces)
    assert out is not None

    attended = out

    def feed(start: int, stop: int) -> Tensor:
        part = attended[:, start:stop]
        fed_forward: Tensor = parts.feed_forward(parts.norm(part))
        return fed_forward + part

    return assemble(feed, pieces, 1, tokens, out)


def _merges(block: Any) -> bool:
    """True if the block's self-attention reads all tokens before it attends to any."""
    return any(hook == "merge_tokens" for _, hook, _ in roles_of(block.attn1))


def _attend(parts: TokenAttention, tokens: Tensor, out: Tensor | None, pieces: list[Span]) -> Tensor:
    """tokens + attend(norm(tokens)), written into ``out`` (which may be ``tokens``), or into a new tensor."""
    if parts.context is None:
        keys = _project(parts.norm, parts.to_k, tokens, pieces)
        values = _project(parts.norm, parts.to_v, tokens, pieces)
    else:
        keys, values = parts.to_k(parts.context), parts.to_v(parts.context)

    def attend(start: int, stop: int) -> Tensor:
        part = tokens[:, start:stop]
        return parts.attend(parts.norm(part), keys) + part

    with _answering(parts.to_k, keys), _answering(parts.to_v, values):
        return assemble(attend, pieces, 1, tokens, out)


def _project(norm: nn.Module, projection: nn.Module, tokens: Tensor, pieces: list[Span]) -> Tensor:
    """projection(norm(tokens)) of all tokens."""
    return assemble(lambda start, stop: projection(norm(tokens[:, start:stop])), pieces, 1, tokens)


@contextlib.contextmanager
def _answering(projection: nn.Module, answer: Tensor) -> Iterator[None]:
    """Make ``projection`` return ``answer`` within the block.

    The replacement lasts for one call: a wrapper that comes later (a LoRA) would be added to an answer that has it."""
    undo = set_patch(wrap(projection, "forward", lambda original, *args, **kwargs: answer, "transformer_chunks"))
    try:
        yield
    finally:
        undo()
