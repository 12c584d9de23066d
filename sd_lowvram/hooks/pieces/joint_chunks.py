"""Blocks of diffusion transformers by chunks of tokens, with keys and values of all tokens.

A block's own forward is called twice with each chunk. The first call is aborted in its attention, and its keys and
values are stored; in the second call the attention gets those of all chunks. Layers that a pass does not need return
zeros, so that nothing is computed twice, except layers that make queries, keys and values at once. The text belongs to
the first chunk; the other chunks get its first token, whose result is dropped.

Source: ours; chunks of queries are from the self-attention of Rabe and Staats 2021. Fidelity: ``rounding``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.attention.torch_kernels import TORCHS_ATTENTION
from ...memory.repeats import representative_pieces
from ...models.anatomy import layer
from ...models.joint import JointBlock, Rows
from ...patches import set_patch, wrap
from ...streaming.weight_scopes import hold_weights
from ...weights import needs_graph, place_part
from ..arguments import given_by_name
from .feed_forward import FEWEST_TOKENS
from .strips import equal_spans

Keys = tuple[Tensor, Tensor]
"""Keys and values (N, heads, tokens, width)."""


def run_in_chunks(
    look: Callable[[nn.Module], JointBlock | None],
    block: nn.Module,
    chunks: int,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the result of ``original``, the forward of ``block``, computed by chunks of the picture's tokens.

    Args:
        look: function from a block to its parts; None if the block is not a joint one.
        block: block of a diffusion transformer.
        chunks: number of chunks.
        original: the block's own forward.
        args, kwargs: its arguments.

    Returns:
        The same as ``original(*args, **kwargs)``, up to rounding.
    """
    parts, arguments = look(block), given_by_name(block, args, kwargs)
    pieces = equal_spans(arguments[parts.picture].shape[1], chunks, FEWEST_TOKENS) if parts is not None else []
    if parts is None or len(pieces) < 2 or not parts.is_plain(arguments) or needs_graph(block, args, kwargs):
        return original(*args, **kwargs)
    texts = parts.texts(arguments)
    rows = [Rows(start, stop, min(texts, 1) if start else texts, texts) for start, stop in pieces]
    with hold_weights():
        keys = _keys_of(parts, original, arguments, rows)
        if keys is None:  # the attention is not torch's function, so its keys are unknown
            return original(*args, **kwargs)
        return _attend(parts, original, arguments, rows, keys)


def _keys_of(
    parts: JointBlock, original: Callable[..., Any], arguments: dict[str, Any], rows: list[Rows]
) -> list[Keys] | None:
    """Keys and values of all tokens for each attention; None if one of them was not called."""
    whole = [_Joined(rows[-1].stop, rows[0].texts if number == 0 else 0, parts.text_last) for number in _streams(parts)]
    with _answering((*parts.queries(), *parts.besides)):
        for some in representative_pieces(rows, arguments[parts.picture]):
            calls = _Calls(len(whole))
            with contextlib.suppress(_Collected), TORCHS_ATTENTION.to(calls.collect):
                original(**parts.part(arguments, some))
            if len(calls.keys) < len(whole):
                return None
            for joined, keys in zip(whole, calls.keys, strict=True):
                joined.add(keys, some)
    return [whole_keys.result() for whole_keys in whole]


def _streams(parts: JointBlock) -> range:
    return range(len(parts.attentions))


def _attend(
    parts: JointBlock, original: Callable[..., Any], arguments: dict[str, Any], rows: list[Rows], keys: list[Keys]
) -> Any:
    """The block's results: tokens of the picture, or the text's and these."""
    total, text, picture = rows[-1].stop, None, None
    both = False
    with _answering(parts.keys()):
        for some in representative_pieces(rows, arguments[parts.picture]):
            mask = parts.mask(arguments, some) if parts.masked_by else None
            with TORCHS_ATTENTION.to(_Given(keys, mask, bool(parts.masked_by)).attend):
                result = original(**parts.part(arguments, some))
            both = isinstance(result, tuple)
            if both and not some.start and result[0] is not None:
                text = result[0].clone()
            picture = place_part(picture, result[1] if both else result, 1, some.start, total)
            del result
    return (text, picture) if both else picture


class _Collected(Exception):
    """The last attention of a block was called: what comes after it is not needed."""


class _Calls:
    """The attentions that a block calls with some rows.

    Attributes:
        keys: of those that were called.
    """

    def __init__(self, wanted: int) -> None:
        self.keys: list[Keys] = []
        self._wanted = wanted

    def collect(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.keys.append((key, value))
        if len(self.keys) == self._wanted:
            raise _Collected
        return query.new_zeros(()).expand(query.shape)


class _Given:
    """The attentions that a block calls with some rows, answered with keys and values of all."""

    def __init__(self, keys: list[Keys], mask: Tensor | None, masks: bool) -> None:
        self._keys, self._mask, self._masks = list(keys), mask, masks

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._keys:
            key, value = self._keys.pop(0)
            attn_mask = self._mask if self._masks else attn_mask
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        return out


class _Joined:
    """Keys and values of all tokens, in the order in which the block has them."""

    def __init__(self, tokens: int, texts: int, text_last: bool) -> None:
        self._tokens, self._texts, self._last = tokens, texts, text_last
        self._whole: list[Tensor | None] = [None, None]

    def add(self, keys: Keys, rows: Rows) -> None:
        """Take what an attention was called with for ``rows``."""
        count = rows.stop - rows.start
        words = rows.words if self._texts else 0
        total = self._tokens + self._texts
        for number, part in enumerate(keys):
            picture, text = (0, count) if self._last else (words, 0)
            place = rows.start if self._last else self._texts + rows.start
            out = place_part(self._whole[number], part.narrow(2, picture, count), 2, place, total)
            if words == self._texts and words:
                out = place_part(out, part.narrow(2, text, words), 2, self._tokens if self._last else 0, total)
            self._whole[number] = out

    def result(self) -> Keys:
        keys, values = self._whole
        assert keys is not None and values is not None
        return keys, values


@contextlib.contextmanager
def _answering(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Make each of ``layers`` return zeros without memory of their own, within the block.

    The replacement lasts for one call, because a LoRA may wrap a layer later."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(set_patch(wrap(layer, "forward", _zeros(layer), "transformer_chunks")))
        yield


def _zeros(module: nn.Module) -> Callable[..., Tensor]:
    width = int(layer(module).out_features)
    return lambda original, x, *args, **kwargs: x.new_zeros(()).expand(*x.shape[:-1], width)
