"""What there is to know of one way to compute attention, ours or a stranger's; nothing here imports torch."""

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
    """``softmax(q k^T * scale + mask) v`` of q (batch, heads, queries, width), k (batch, heads, keys, width) and v
    (batch, heads, keys, value width).

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
    """One way to compute attention: a value of the knob ``attention``, by the name under which it is registered.

    Whether it repeats its bits is not declared: ``deterministic`` and ``doctor`` try it on the machine at hand.

    Attributes:
        attend: the function; it takes ``upcast`` and ``score_bytes`` by name.
        why_not: why it cannot run a :class:`~sd_lowvram.kernels.attention.problem.Problem`, None where it can. Of a
            problem that is not ``real`` only shapes are known, and its device may be absent.
        held_bytes: bytes that it holds beside arguments and output while it runs a problem, for kernels into which a
            trace cannot look. None: it calls torch's own operations, which a trace follows.
        label: in a host's list of attention optimisations; "": it is not listed there.
        fidelity: against attention in the model's own type.
        before: the backend before which this one is chosen where nobody asks for one, as it is the faster: "sdpa" comes
            first. It must then run every problem on devices on which it runs at all. "": chosen only by name, as
            approximate ones are in any case.
    """

    attend: AttentionFunction
    why_not: Callable[[Problem], str | None] | None = None
    held_bytes: Callable[[Problem], int] | None = None
    label: str = ""
    fidelity: Fidelity = Fidelity.ROUNDING
    before: str = ""
