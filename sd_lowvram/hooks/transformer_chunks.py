"""Transformer blocks by chunks of tokens: of queries, outputs and norms only a chunk exists at a time.

Keys and values of all tokens are made once, chunk by chunk, and then every chunk of queries runs through the block's
own attention, under the host's own processor, whose projections of keys and values answer with what is there. That
holds for processors in which a query's row does not depend on the other queries; blocks with any other are left alone.

Source: ours; chunks of queries are from the self-attention of Rabe and Staats 2021. Fidelity: ``rounding``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NoSiteError
from ..models.anatomy import Anatomy
from ..patches import Patch, set_patch, wrap
from ..settings import Settings
from .feed_forward import FEWEST_TOKENS
from .lending import kept
from .strips import Span, assembled, needs_graph, spans

_ROW_BY_ROW = frozenset({"AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor"})


def transformer_chunks(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's transformer blocks over ``settings.transformer_chunks`` chunks of tokens (N, tokens, C).

    Raises:
        NoSiteError: the target has no transformer block of the plain kind.
    """
    unet = anatomy.unet
    blocks = [] if unet is None else [module for module in unet.modules() if _is_plain(module)]
    if not blocks:
        raise NoSiteError("transformer chunks: the model has no plain transformer block")
    for block in blocks:
        around = functools.partial(_in_chunks, block, settings.transformer_chunks or 1)
        yield wrap(block, "forward", around, "transformer_chunks")


def _is_plain(block: Any) -> bool:
    """Whether it is x + attn1(norm1(x)), x + attn2(norm2(x), context), x + ff(norm3(x)), and nothing else."""
    if not all(hasattr(block, name) for name in ("norm1", "attn1", "norm2", "attn2", "norm3", "ff")):
        return False
    norms = [block.norm1, block.norm3] + ([] if block.attn2 is None else [block.norm2])
    layer_norm = getattr(block, "norm_type", "layer_norm") == "layer_norm"
    extras = [getattr(block, name, None) for name in ("pos_embed", "only_cross_attention", "_chunk_size")]
    return layer_norm and all(isinstance(norm, nn.LayerNorm) for norm in norms) and not any(extras)


def _is_row_by_row(attention: Any) -> bool:
    mixes = (getattr(attention, name, None) for name in ("group_norm", "spatial_norm", "norm_cross"))
    return type(attention.processor).__name__ in _ROW_BY_ROW and not any(mixes)


def _in_chunks(
    block: Any,
    chunks: int,
    original: Callable[..., Tensor],
    tokens: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Tensor | None = None,
    *args: Any,
    cross_attention_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    pieces = spans(tokens.shape[1], chunks, FEWEST_TOKENS)
    attentions = [attention for attention in (block.attn1, block.attn2) if attention is not None]
    leave = len(pieces) == 1 or args or needs_graph(block, tokens, encoder_hidden_states)
    leave = leave or not (_is_plain(block) and all(map(_is_row_by_row, attentions)))
    leave = leave or "gligen" in (cross_attention_kwargs or {}) or isinstance(encoder_hidden_states, (tuple, list))
    leave = leave or any(mask is not None and mask.shape[1] > 1 for mask in (attention_mask, encoder_attention_mask))
    if leave:
        kwargs["cross_attention_kwargs"] = cross_attention_kwargs
        return original(tokens, attention_mask, encoder_hidden_states, encoder_attention_mask, *args, **kwargs)
    extra = cross_attention_kwargs or {}
    given = {"attention_mask": attention_mask, **extra}
    out = _attended(block.norm1, block.attn1, tokens, None, None, pieces, given)
    if block.attn2 is not None:
        given = {"attention_mask": encoder_attention_mask, **extra}
        out = _attended(block.norm2, block.attn2, out, out, encoder_hidden_states, pieces, given)

    def fed(start: int, stop: int) -> Tensor:
        part = out[:, start:stop]
        return block.ff(block.norm3(part)) + part

    with kept():
        return assembled(fed, pieces, 1, tokens, out)


def _attended(
    norm: nn.Module,
    attention: Any,
    tokens: Tensor,
    out: Tensor | None,
    context: Tensor | None,
    pieces: list[Span],
    given: dict[str, Any],
) -> Tensor:
    """tokens + attention(norm(tokens), context), written into ``out`` (which may be ``tokens``), or into new room."""
    if context is None:
        keys = _projected(norm, attention.to_k, tokens, pieces)
        values = _projected(norm, attention.to_v, tokens, pieces)
    else:
        keys, values = attention.to_k(context), attention.to_v(context)

    def attended(start: int, stop: int) -> Tensor:
        part = tokens[:, start:stop]
        # of a context whose keys and values are there, only the batch and the length are looked at
        return attention(norm(part), encoder_hidden_states=keys, **given) + part

    with kept(), _answering(attention.to_k, keys), _answering(attention.to_v, values):
        return assembled(attended, pieces, 1, tokens, out)


def _projected(norm: nn.Module, projection: nn.Module, tokens: Tensor, pieces: list[Span]) -> Tensor:
    """projection(norm(tokens)) of all tokens."""
    with kept():
        return assembled(lambda start, stop: projection(norm(tokens[:, start:stop])), pieces, 1, tokens)


@contextlib.contextmanager
def _answering(projection: nn.Module, answer: Tensor) -> Iterator[None]:
    """Inside, ``projection`` gives ``answer``. Set for the call and not for good: what is around it then (a LoRA that
    was loaded since) would otherwise add to an answer that has it already."""
    undo = set_patch(wrap(projection, "forward", lambda original, *args, **kwargs: answer, "transformer_chunks"))
    try:
        yield
    finally:
        undo()
