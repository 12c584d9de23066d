"""Attention in bounded memory, in plain torch: `attend_sliced` and `fused_softmax`.

Both take q (batch, heads, queries, width), k (batch, heads, keys, width), v (batch, heads, keys, value width), an
optional mask that broadcasts to (batch, heads, queries, keys), bool (True attends) or additive float, and the scale of
the scores (default width**-0.5). Both return (batch, heads, queries, value width), laid out in memory as (batch,
queries, heads, value width), which is what the output projection reads. A row whose keys are all masked gives zeros,
as torch's own kernels do since 2.5 (older ones give NaN).

Nothing is copied to be multiplied: a slice of heads of one picture is a strided view, which BLAS takes as it is (half
types on the CPU excepted).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory.repeats import representative_pieces
from .backend import SCORE_BYTES
from .problem import Problem, empty_output, problem_of

_USEFUL_ROWS = 128  # with fewer rows a matrix product starves, so keys are split before rows
_FEWEST_KEYS = 16


@dataclass(frozen=True)
class ScoreBlock:
    """Heads, query rows and keys of one block of the score matrix, and the bytes held in addition to the output."""

    heads: int
    rows: int
    keys: int
    bytes: int


@dataclass(frozen=True)
class _BlockBytes:
    """Bytes that a block holds for each score, for each query row and for each key of a head."""

    score: int
    row: int
    key: int

    def blocks(self, heads: int, rows: int, keys: int) -> ScoreBlock:
        return ScoreBlock(heads, rows, keys, heads * (rows * (keys * self.score + self.row) + keys * self.key))

    def fit(self, problem: Problem, score_bytes: int) -> ScoreBlock:
        """All keys at once: as many whole heads as fit, else as many rows of one head as fit, at least one."""
        head_bytes = self.blocks(1, problem.queries, problem.keys).bytes
        if head_bytes <= score_bytes:
            return self.blocks(_even(problem.heads, score_bytes // head_bytes), problem.queries, problem.keys)
        row_bytes = problem.keys * self.score + self.row
        rows = max(1, (score_bytes - problem.keys * self.key) // row_bytes)
        return self.blocks(1, _even(problem.queries, rows), problem.keys)

    def fit_keys(self, problem: Problem, score_bytes: int) -> ScoreBlock | None:
        """A useful number of rows of one head, and as many keys as fit with them; None if all keys fit."""
        rows = min(problem.queries, _USEFUL_ROWS)
        keys = (score_bytes - rows * self.row) // (rows * self.score + self.key)
        if keys >= problem.keys:
            return None
        if keys >= _FEWEST_KEYS:
            return self.blocks(1, rows, _even(problem.keys, keys))
        keys = min(problem.keys, _FEWEST_KEYS)
        rows = max(1, (score_bytes - keys * self.key) // (keys * self.score + self.row))
        return self.blocks(1, min(rows, problem.queries), keys)


def sliced_blocks(problem: Problem, score_bytes: int) -> ScoreBlock:
    """Slices of `attend_sliced`: ``score_bytes`` hold scores and probabilities, or one row if a row alone is larger."""
    score, widened, values = _common_costs(problem)
    costs = _BlockBytes(score + problem.score_dtype.itemsize, widened + values + 8, widened + values)
    return costs.fit(problem, score_bytes)


def fused_blocks(problem: Problem, score_bytes: int) -> ScoreBlock:
    """The blocks of `fused_softmax`: within ``score_bytes`` whatever the number of keys."""
    score, widened, values = _common_costs(problem)
    size, value_size = problem.score_dtype.itemsize, problem.value_dtype.itemsize
    wide = max(4, size)
    row, key = widened + 4 * size, max(widened, values)
    means = problem.value_width * (value_size + wide * (1 if value_size == wide else 2))  # of this block, and merged
    split = _BlockBytes(score, row + means + 8 * wide, key).fit_keys(problem, score_bytes)
    return split or _BlockBytes(score, row + values, key).fit(problem, score_bytes)


def _common_costs(problem: Problem) -> tuple[int, int, int]:
    """Bytes for each score, for each widened row of q or k, and for each row of v that is widened, or of a narrowed
    result. A score counts with an inverted mask at times, and with the probability in v's type."""
    size, value_size = problem.score_dtype.itemsize, problem.value_dtype.itemsize
    narrowed = problem.value_dtype != problem.score_dtype
    score = size + max(problem.mask == "bool", value_size * narrowed)
    widened = size * problem.width * (problem.score_dtype != problem.dtype)
    return score, widened, value_size * problem.value_width * (problem.value_dtype != problem.dtype)


def attend_sliced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    upcast: bool = False,
    score_bytes: int = SCORE_BYTES,
) -> Tensor:
    """Softmax attention for a slice of pictures, heads and query rows at a time.

    Rows are split too, so that one head of width 512 over a large picture stays bounded. ``upcast`` computes the
    scores in float32.

    Fidelity: rounding. Source: basujindal's split of CompVis attention; attention slicing in diffusers.

    Args:
        q: (batch, heads, queries, width).
        k: (batch, heads, keys, width).
        v: (batch, heads, keys, value width).
        mask: bool (True attends) or additive, broadcastable to (batch, heads, queries, keys).
        scale: of the scores; None: width**-0.5.
        upcast: True to compute the scores in float32.
        score_bytes: the most bytes of scores held at once.

    Returns:
        (batch, heads, queries, value width), in memory (batch, queries, heads, value width).
    """
    problem = problem_of(q, k, v, mask, upcast)
    blocks = sliced_blocks(problem, score_bytes)
    scale, out = _scale(q, scale), empty_output(q, v)
    mask = None if mask is None else mask_4d(mask)
    space = [_space(blocks, problem, q) for _ in ("scores", "probabilities")]
    for picture in _spans(problem.batch, 1, q):
        for head in _spans(problem.heads, blocks.heads, q):
            keys = k[picture, head][0].to(problem.score_dtype)
            values = v[picture, head][0].to(problem.value_dtype)
            for row in _spans(problem.queries, blocks.rows, q):
                scores, probs = (_view_scores(part, q[picture, head, row], keys) for part in space)
                _scores(scores, q[picture, head, row][0], keys, scale)
                part = None if mask is None else _part(mask, picture, head, row, slice(None))
                _softmax_times(scores, probs, values, part, out[picture, head, row][0])
            del keys, values
    return out


def _softmax_times(scores: Tensor, probs: Tensor, values: Tensor, mask: Tensor | None, out: Tensor) -> None:
    """softmax(scores + mask) @ values into ``out``; ``probs`` is space shaped like ``scores``."""
    blind = None
    if mask is not None:
        _apply_mask(scores, mask)
        blind = scores.amax(-1, keepdim=True) == float("-inf")
    torch.softmax(scores, -1, out=probs)
    if blind is not None:
        probs.masked_fill_(blind, 0)
    if values.dtype == out.dtype:
        torch.bmm(probs.to(values.dtype), values, out=out)
    else:
        out.copy_(torch.bmm(probs, values))


def fused_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    *,
    upcast: bool = False,
    score_bytes: int = SCORE_BYTES,
) -> Tensor:
    """Softmax attention that never stores softmax(QK^T): only the row maximum m and the row sum s are stored.

    The scores of a block are overwritten by exp(score - m) and multiplied with v immediately. Keys are taken in chunks
    too, merged in float32 by their m and s, so a block stays within ``score_bytes`` whatever the number of keys.

    Fidelity: rounding. Source: partially fused softmax, Chen et al. 2023, "Speed Is All You Need"; the merging of
    chunks is the online softmax of Milakov and Gimelshein 2018.

    Args:
        q, k, v, mask, scale, upcast, score_bytes: as for :func:`attend_sliced`.

    Returns:
        As :func:`attend_sliced`.
    """
    problem = problem_of(q, k, v, mask, upcast)
    blocks = fused_blocks(problem, score_bytes)
    scale, out = _scale(q, scale), empty_output(q, v)
    mask = None if mask is None else mask_4d(mask)
    space = _space(blocks, problem, q)
    at_once = blocks.keys == problem.keys and problem.value_dtype == problem.dtype
    for picture in _spans(problem.batch, 1, q):
        for head in _spans(problem.heads, blocks.heads, q):
            for row in _spans(problem.queries, blocks.rows, q):
                queries = q[picture, head, row][0].to(problem.score_dtype)
                target = out[picture, head, row][0]
                seen: _Seen | None = None
                for span in _spans(problem.keys, blocks.keys, q):
                    scores = _view_scores(space, queries, k[picture, head, span])
                    _scores(scores, queries, k[picture, head, span][0], scale)
                    if mask is not None:
                        _apply_mask(scores, _part(mask, picture, head, row, span))
                    values = v[picture, head, span][0].to(problem.value_dtype)
                    seen = _merge(seen, *_mean(scores, values, target if at_once else None))
                    del values
                if seen is not None and not at_once:
                    target.copy_(seen.mean)
                del queries, seen
    return out


@dataclass
class _Seen:
    """Attention over the keys seen so far: the mean of their values, the row maximum m and the row sum s."""

    mean: Tensor
    m: Tensor
    s: Tensor


def _mean(scores: Tensor, values: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of ``values`` (into ``target`` when given), m and s of one block of scores, which are overwritten."""
    # The lowest finite number in place of -inf, so that a fully masked row gives exp(-inf) = 0 and not NaN.
    m = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    s = scores.sub_(m).exp_().sum(-1, keepdim=True, dtype=torch.promote_types(scores.dtype, torch.float32))
    divisor = s.clamp(min=1)  # the largest score adds exp(0) = 1, so this touches fully masked rows only
    if values.dtype != torch.float16:
        return torch.bmm(scores.to(values.dtype), values, out=target).div_(divisor), m, s
    scores.div_(divisor)  # a plain sum over thousands of keys would overflow fp16
    return torch.bmm(scores.to(values.dtype), values, out=target), m, s


def _merge(seen: _Seen | None, mean: Tensor, m: Tensor, s: Tensor) -> _Seen:
    """Add one block's mean, m and s to what was seen, in float32."""
    if seen is None:
        return _Seen(mean.to(s.dtype), m.to(s.dtype), s)
    m_both = torch.maximum(seen.m, m)
    before, now = seen.s.mul_((seen.m - m_both).exp_()), s.mul_((m - m_both).exp_())
    s_both = before + now
    divisor = s_both.clamp(min=1)
    seen.mean.mul_(before.div_(divisor)).addcmul_(mean.to(s.dtype), now.div_(divisor))
    return _Seen(seen.mean, m_both, s_both)


def _scores(space: Tensor, queries: Tensor, keys: Tensor, scale: float) -> None:
    queries, keys = queries.to(space.dtype), keys.to(space.dtype)
    space.baddbmm_(queries, keys.transpose(1, 2), beta=0, alpha=scale)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _space(blocks: ScoreBlock, problem: Problem, q: Tensor) -> Tensor:
    return torch.empty(blocks.heads * blocks.rows * blocks.keys, dtype=problem.score_dtype, device=q.device)


def _view_scores(space: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    heads, rows, count = queries.shape[-3], queries.shape[-2], keys.shape[-2]
    return space[: heads * rows * count].view(heads, rows, count)


def _even(total: int, most: int) -> int:
    """The smallest step that covers ``total`` in as few steps as ``most`` would."""
    return -(-total // -(-total // min(most, total)))


def _spans(total: int, step: int, like: Tensor) -> Iterator[slice]:
    """Slices of ``step`` over ``total``."""
    return representative_pieces([slice(start, min(start + step, total)) for start in range(0, total, step)], like)


def mask_4d(mask: Tensor) -> Tensor:
    """The mask with leading dimensions of size 1 up to (batch, heads, queries, keys)."""
    return mask[(None,) * (4 - mask.ndim)]


def _part(mask: Tensor, *index: slice) -> Tensor:
    """The piece of a broadcast mask that belongs to a block, as (heads or 1, rows or 1, keys or 1)."""
    return mask[tuple(slice(None) if size == 1 else part for size, part in zip(mask.shape, index))][0]  # noqa: B905


def _apply_mask(scores: Tensor, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    else:
        scores.add_(mask)
