"""Weights that are lent to a layer for one call, and stay lent while it is called strip after strip.

A hook that widens weights lends them with :func:`lent_to_call`; a hook that calls a layer many times in a row does so
within :func:`kept`, and the weights come once instead of every time. A hook that calls whole modules many times does so
within :func:`together`: nothing more is lent for longer, but who streams weights in knows that they will be needed
again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..weights import Convert, lent

_Kept = dict[tuple[int, int], tuple[Tensor, Convert, contextlib.ExitStack]]
"""What is lent until the block ends, by the ids of a tensor and of its conversion, which are held so that they stay
theirs."""


class _ExitCallbacks(contextlib.ExitStack):
    """What is done when the outermost of ``depth`` blocks ends, once for each who asked."""

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
def kept() -> Iterator[None]:
    """Within the block, what a layer is lent at its first call stays lent; in another such block, until that ends."""
    if _state.kept is not None:
        yield
        return
    with together(), contextlib.ExitStack() as ending:
        known: _Kept = {}
        _state.kept = known
        try:
            yield
        finally:
            _state.kept = None
            for _, _, lending in known.values():
                ending.enter_context(lending)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Within the block, modules are called again and again: what is streamed in stays as long as there is room."""
    block = _state.together = _state.together or _ExitCallbacks()
    block.depth += 1
    try:
        yield
    finally:
        block.depth -= 1
        if block.depth == 0:
            _state.together = None
            block.close()


def until_together_ends(owner: object, number: int, release: Callable[[int], None]) -> bool:
    """Call ``release(number)`` when the present :func:`together` ends, once; False where there is none,
    or where that has been asked for.

    ``owner`` is told by its identity and must outlive the block.
    """
    block = _state.together
    if block is None or (id(owner), number) in block.known:
        return False
    block.known.add((id(owner), number))
    block.callback(release, number)
    return True


@contextlib.contextmanager
def apart(rows: tuple[int, int] | None = None) -> Iterator[None]:
    """Within the block, weights are lent for each call alone, although :func:`kept` is around it.

    Args:
        rows: the first and last output of the layer that runs inside, where its weight holds these rows only.
    """
    before, _state.kept, _state.rows = (_state.kept, _state.rows), None, rows
    try:
        yield
    finally:
        _state.kept, _state.rows = before


def present_rows() -> slice:
    """The rows of its whole weight that a layer has now."""
    return slice(*_state.rows) if _state.rows is not None else slice(None)


def give_back(tensors: Iterable[Tensor]) -> None:
    """End what :func:`kept` keeps of these tensors: they are taken away."""
    known, wanted = _state.kept or {}, set(map(id, tensors))
    for key in [key for key in reversed(known) if key[0] in wanted]:
        known.pop(key)[2].close()


@contextlib.contextmanager
def lent_to_call(tensors: Iterable[Tensor], convert: Convert) -> Iterator[None]:
    """Within the block every tensor holds ``convert`` of its contents, and for longer inside :func:`kept`.

    ``convert`` is told by its identity: give the same function for every call of a layer.
    """
    if _state.kept is None:
        with lent(tensors, convert):
            yield
        return
    for tensor in tensors:
        key = id(tensor), id(convert)
        if key not in _state.kept:
            lending = contextlib.ExitStack()
            lending.enter_context(lent([tensor], convert))
            _state.kept[key] = tensor, convert, lending
    yield
