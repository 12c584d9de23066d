"""Weights that are lent to a layer for one call, and stay lent while it is called strip after strip.

A hook that streams or widens weights lends them with :func:`lent_to_call`; a hook that calls a layer many times in a
row does so within :func:`kept`, and the weights come once instead of every time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from torch import Tensor

from ..weights import Convert, lent


class _Kept:
    """What is lent until the block ends."""

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.known: dict[tuple[int, int], object] = {}

    def lend(self, tensors: Iterable[Tensor], convert: Convert) -> None:
        for tensor in tensors:
            key = id(tensor), id(convert)
            if key not in self.known:
                self.known[key] = tensor, convert  # held, so that their ids stay theirs
                self.stack.enter_context(lent([tensor], convert))


class _State(threading.local):
    kept: _Kept | None = None


_state = _State()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within the block, what a layer is lent at its first call stays lent; in another such block, until that ends."""
    if _state.kept is not None:
        yield
        return
    _state.kept = _Kept()
    try:
        with _state.kept.stack:
            yield
    finally:
        _state.kept = None


@contextlib.contextmanager
def lent_to_call(tensors: Iterable[Tensor], convert: Convert) -> Iterator[None]:
    """Within the block every tensor holds ``convert`` of its contents, and for longer inside :func:`kept`.

    ``convert`` is told by its identity: give the same function for every call of a layer.
    """
    if _state.kept is None:
        with lent(tensors, convert):
            yield
    else:
        _state.kept.lend(tensors, convert)
        yield
