"""The declaration of an attention backend, ours or registered; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...knob import Fidelity

if TYPE_CHECKING:
    from torch import Tensor

    from .problem import Problem

SCORE_BYTES = 32 << 20
"""Bytes of scores that a backend which works in blocks holds at once, where nothing else is said."""


class AttentionFunction(Protocol):
    """Function that computes ``softmax(q k^T * scale + mask) v``.

    Shapes: q (batch, heads, queries, width), k (batch, heads, keys, width), v (batch, heads, keys, value width).

    Args:
        mask: bool (True attends) or additive, broadcastable to (batch, heads, queries, keys).
        scale: of the scores; width**-0.5 when not given.
        upcast: compute the scores in float32.
        score_bytes: the most bytes of scores held at once, where they are held at all.

    Returns:
        (batch, heads, queries, value width), in memory (batch, queries, heads, value width); zeros for a query that
        sees nothing. Float64 is computed in float64.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
        /,
        *,
        upcast: bool = False,
        score_bytes: int = SCORE_BYTES,
    ) -> Tensor: ...


@dataclass(frozen=True)
class AttentionBackend:
    """A way to compute attention: a value of the knob ``attention``, under its registered name.

    Determinism is not declared: ``deterministic`` and ``doctor`` test it on this machine.

    Attributes:
        attend: the function; ``upcast`` and ``score_bytes`` are keyword arguments.
        why_not: function that returns the reason why it cannot run a
            :class:`~sd_lowvram.kernels.attention.problem.Problem`, or None. Of a problem that is not ``real`` only
            shapes are known, and its device may be absent.
        held_bytes: function that returns the bytes that it holds in addition to arguments and output, for kernels that
            a trace cannot see. None: it calls torch's own operations, which a trace follows.
        label: name in a host's list of attention optimisations; "": it is not listed.
        fidelity: fidelity against attention in the model's own type.
        before: a slower backend before which this one is chosen by default ("sdpa" is the first of ours). It must then
            run every problem on devices on which it runs at all. "": it is chosen only explicitly, like all
            approximate ones.
    """

    attend: AttentionFunction
    why_not: Callable[[Problem], str | None] | None = None
    held_bytes: Callable[[Problem], int] | None = None
    label: str = ""
    fidelity: Fidelity = Fidelity.ROUNDING
    before: str = ""
