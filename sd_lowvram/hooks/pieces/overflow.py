"""Protection against black pictures: strips with NaN or infinity are computed again before they are used.

A sum over the strip detects them without extra memory. A failed strip is repeated once unchanged, because a fault of
the machine may pass; if it overflows in float16, it is computed in float32, a few rows at a time, with each layer's
weights widened for its call. If float16 cannot represent the result, the map continues in bfloat16, which has as many
bytes and the range of float32. The peaks of plans include such rows. On a CPU every strip is checked. On other devices
that would synchronise at each strip, so the finished picture is checked: a single NaN spreads over all of it, because
every layer normalises by the whole map. The pass is then repeated strip by strip.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.private import FakeTensor
from ...errors import NotFiniteError
from ...memory.repeats import exclude_from_counts, run_uncounted
from ...patches import Answered
from ...progress import log_event
from ...weights import place_part

Rows = Callable[[int, int, bool], Tensor]
"""Rows (N, C, start to stop, W) of a map; True: in float32."""

_PIECES = 4
"""Parts of a strip that are computed in float32 one after the other."""


def is_finite(values: Tensor) -> bool:
    """True if no value is NaN or infinite. Synchronises with their device."""
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    # A sum reads the values once, which is faster; it may overflow although all values are finite.
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())


class OverflowCheck:
    """Looks at the strips of one pass through an autoencoder.

    Attributes:
        looks: whether it does; otherwise strips are taken as they come.
    """

    def __init__(self, stage: str, x: Tensor, looks: bool) -> None:
        self.looks = looks
        self._stage = stage
        self._dtype = self._kept_in = x.dtype
        self._device = x.device
        self._plans = isinstance(x, FakeTensor) and x.dtype == torch.float16
        self._overflows = False
        self._again = self._widened = 0

    def rows(self, compute: Rows, start: int, stop: int, final: bool = False, kind: Hashable = None) -> Tensor:
        """Result of ``compute`` for rows ``start`` to ``stop``, finite wherever it is checked.

        Args:
            compute: function from (start, stop, in float32) to rows (N, C, rows, W).
            start, stop: rows of the result.
            final: True for the last result, which has the type of the input whatever the type of the maps.
            kind: equal for rows that are computed in float32 in the same way; None: unknown.

        Returns:
            (N, C, stop - start, W).

        Raises:
            NotFiniteError: the rows are not finite in float32 either.
        """
        if self._plans:
            part = functools.partial(self._compute_float32, compute, start, start + piece(start, stop), final)
            run_uncounted((start, stop, object()) if kind is None else kind, part)
        if self._kept_in != self._dtype:
            self._widened += 1
            return self._compute_float32(compute, start, stop, final)
        result = compute(start, stop, False)
        if not self.looks or is_finite(result):
            return result
        del result
        if not self._overflows:
            self._again += 1
            result = compute(start, stop, False)
            if is_finite(result):
                return result
            del result
            self._again -= 1
        self._overflows = True
        if self._dtype != torch.float16:
            raise self._refusal(f"rows {start} to {stop}")
        self._widened += 1
        return self._compute_float32(compute, start, stop, final)

    def whole(self, compute: Callable[[bool], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Like :meth:`rows`, for a whole map; ``compute`` gets True for float32.

        Args:
            compute: function from "in float32" to tensors.

        Raises:
            NotFiniteError: they are not finite in float32 either.
        """
        if self._plans:
            with exclude_from_counts(), compute_in_float32(self._device):
                compute(True)
        if self._kept_in == self._dtype:
            for _ in range(2 if self.looks else 1):
                results = compute(False)
                if not self.looks or all(map(is_finite, results)):
                    return results
                del results
            if self._dtype != torch.float16:
                raise self._refusal("all rows")
        with compute_in_float32(self._device):
            return compute(True)

    def _compute_float32(self, compute: Rows, start: int, stop: int, final: bool) -> Tensor:
        """Compute rows in float32, and return them in the type of the maps."""
        out: Tensor | None = None
        step = piece(start, stop)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            with compute_in_float32(self._device):
                result = compute(first, last, True)
            part = result.to(self._dtype if final else self._kept_in)
            if not isinstance(part, FakeTensor) and not is_finite(part):
                if final or not is_finite(result):
                    raise self._refusal(f"rows {first} to {last}")
                self._kept_in = torch.bfloat16
                part = result.to(self._kept_in)
                out = None if out is None else out.to(self._kept_in)
            del result
            out = place_part(out, part, 2, first - start, stop - start)
        assert out is not None
        return out

    def _refusal(self, what: str) -> NotFiniteError:
        half = self._dtype == torch.float16
        wide, first = (" in float32 too", "load it in float32 (--precision fp32), or ") if half else ("", "load ")
        return NotFiniteError(
            f"{self._stage}: {what} of a map are NaN or infinity{wide}: the autoencoder's "
            f"weights are damaged, too large for their type, or not made for this model; {first}another one"
        )

    def tell(self) -> None:
        """Log which rows were computed again."""
        if self._again:
            log_event(__name__, f"{self._stage}: {_strips(self._again)} computed again, because of NaN or infinity")
        if self._widened:
            storage = ", and its maps from there on stored in bfloat16" if self._kept_in != self._dtype else ""
            warnings.warn(
                f"{self._stage}: the autoencoder overflowed in float16: {_strips(self._widened)} computed in "
                f"float32{storage}. It is faster loaded in float32 or bfloat16",
                stacklevel=4,
            )


def piece(start: int, stop: int) -> int:
    """Rows that are computed in float32 at once."""
    return max(1, (stop - start) // _PIECES)


def _strips(count: int) -> str:
    return f"{count} strip{'s were' if count > 1 else ' was'}"


@contextlib.contextmanager
def compute_in_float32(device: torch.device) -> Iterator[None]:
    """Make layers compute in float32 for float32 inputs within the block, whatever the type of their weights."""
    with Answered(_WIDENED), torch.autocast(device.type, enabled=False):
        yield


def _widen(layer: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return layer(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype.itemsize < 4 else value


_WIDENED = {layer: functools.partial(_widen, layer) for layer in (F.conv2d, F.linear)}
"""Layers whose weights are widened when they multiply by them."""
