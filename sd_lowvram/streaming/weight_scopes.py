"""Scopes for lent weights: one call of a layer, or many calls in a row.

A hook that widens weights lends them with :func:`lend_to_call`. A hook that calls a layer many times in a row does so
within :func:`hold_weights`, and the weights are fetched and widened once. A hook that calls whole modules many times
does so within :func:`repeated_calls`: no weight is lent for longer, but the streaming engine keeps the weights on the
device while they fit, because they will be needed again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..weights import Convert, lend_contents

_Kept = dict[tuple[int, int], tuple[Tensor, Convert, contextlib.ExitStack]]
"""Weights lent until the block ends, by the ids of tensor and conversion; both are held, so that the ids stay valid."""


class _ExitCallbacks(contextlib.ExitStack):
    """Callbacks that run when the outermost nested scope exits; one per owner."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[tuple[int, int]] = set()
        self.depth = 0


class _ThreadScopes(threading.local):
    kept: _Kept | None = None
    together: _ExitCallbacks | None = None
    rows: tuple[int, int] | None = None


_state = _ThreadScopes()


@contextlib.contextmanager
def hold_weights() -> Iterator[None]:
    """Keep weights on the device across calls until the outermost block exits."""
    if _state.kept is not None:
        yield
        return
    with repeated_calls(), contextlib.ExitStack() as ending:
        lent_weights: _Kept = {}
        _state.kept = lent_weights
        try:
            yield
        finally:
            _state.kept = None
            for _, _, lending in lent_weights.values():
                ending.enter_context(lending)


@contextlib.contextmanager
def repeated_calls() -> Iterator[None]:
    """Announce that modules are called repeatedly within the block: streamed weights stay while they fit."""
    block = _state.together = _state.together or _ExitCallbacks()
    block.depth += 1
    try:
        yield
    finally:
        block.depth -= 1
        if block.depth == 0:
            _state.together = None
            block.close()


def open_repeats() -> object | None:
    """The outermost open :func:`repeated_calls`; None if there is none."""
    return _state.together


def holds_converted() -> bool:
    """True if converted weights are held by :func:`hold_weights`."""
    return bool(_state.kept)


def release_after_repeats(owner: object, number: int, release: Callable[[int], None]) -> bool:
    """Call ``release(number)`` once when the current :func:`repeated_calls` ends.

    Return False if there is none, or if this was requested before. ``owner`` is identified by its id and must outlive
    the block.

    Args:
        owner: who requests it, identified by its id; it must outlive the block.
        number: argument of ``release``.
        release: function to call.

    Returns:
        False if there is no such block, or if this was requested before.
    """
    block = _state.together
    if block is None or (id(owner), number) in block.known:
        return False
    block.known.add((id(owner), number))
    block.callback(release, number)
    return True


@contextlib.contextmanager
def lend_per_call(rows: tuple[int, int] | None = None) -> Iterator[None]:
    """Lend weights for each call alone within the block, even inside :func:`hold_weights`.

    Args:
        rows: the first and last output row of the layer, if its weight holds only these rows.
    """
    before, _state.kept, _state.rows = (_state.kept, _state.rows), None, rows
    try:
        yield
    finally:
        _state.kept, _state.rows = before


def present_rows() -> slice:
    """Return the rows of its whole weight that a layer has now."""
    return slice(*_state.rows) if _state.rows is not None else slice(None)


def give_back(tensors: Iterable[Tensor]) -> None:
    """End the lending of evicted tensors by :func:`hold_weights`."""
    lent_weights = _state.kept
    if not lent_weights:
        return
    wanted = set(map(id, tensors))
    for key in [key for key in reversed(lent_weights) if key[0] in wanted]:
        lent_weights.pop(key)[2].close()


@contextlib.contextmanager
def lend_to_call(tensors: Iterable[Tensor], convert: Convert) -> Iterator[None]:
    """Replace the contents of tensors within the block, or longer inside :func:`hold_weights`.

    Args:
        tensors: weights of the layer that is called.
        convert: function from their contents to the temporary ones. It is identified by its id: pass the same function
            for every call of a layer.
    """
    if _state.kept is None:
        with lend_contents(tensors, convert):
            yield
        return
    for tensor in tensors:
        key = id(tensor), id(convert)
        if key not in _state.kept:
            lending = contextlib.ExitStack()
            lending.enter_context(lend_contents([tensor], convert))
            _state.kept[key] = tensor, convert, lending
    yield
