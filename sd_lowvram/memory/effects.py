"""What a call of a module did in a trace, so that an equal call need not run again.

On fake tensors a call hangs on shapes alone: what it held above what was there before, what it had to compute, and what
it gave are the same the next time, in another module with weights of the same shapes too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..repeats import times
from .accounts import current_account
from .fakes import CPU, fake_empty
from .ledger import Ledger
from .work import Span, Work


class _State(threading.local):
    short: bool = False
    effects: Effects | None = None


_state = _State()


@contextlib.contextmanager
def repeated_once() -> Iterator[None]:
    """Inside, traces are short: :func:`once` leaves out what ran before."""
    before, _state.short = _state.short, True
    try:
        yield
    finally:
        _state.short = before


def once(kind: Hashable, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``run(*args, **kwargs)``; inside a short trace, where an equal call ran before, what that did.

    Args:
        kind: all that the call hangs on besides its arguments.
    """
    return run(*args, **kwargs) if _state.effects is None else _state.effects.once(kind, run, args, kwargs)


@dataclass(frozen=True)
class _Made:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Effect:
    """``above``: peaks over what was there; ``path`` and ``times``: of the module that ran, and of the loops around."""

    above: tuple[int, ...]
    spans: tuple[Span, ...]
    path: str
    times: int
    results: tuple[Any, ...]
    structure: TreeSpec


class Effects:
    """The calls of one trace."""

    def __init__(self, ledger: Ledger, work: Work, mode: FakeTensorMode) -> None:
        self._ledger, self._work, self._mode = ledger, work, mode
        self._known: dict[Any, _Effect | None] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, :func:`once` knows of these calls, if traces are to be short."""
        before, _state.effects = _state.effects, self if _state.short else None
        try:
            yield
        finally:
            _state.effects = before

    def once(self, kind: Hashable, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = self._given((args, kwargs))
        if given is None:
            return run(*args, **kwargs)
        key = kind, given
        if key not in self._known:
            result, self._known[key] = self._noted(run, args, kwargs)
            return result
        effect = self._known[key]
        return run(*args, **kwargs) if effect is None else self._again(effect)

    def _noted(self, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Effect | None]:
        """The result of the call, and its effect; None where it did more than to make its results."""
        ledger, path = self._ledger, self._ledger.path
        ledger.settle()
        live, met, first = dict(ledger.live), ledger.met, len(self._work.spans)
        self._work.spans.append(Span(path))  # what comes is not added to the span before
        with ledger.apart() as above:
            result = run(*args, **kwargs)
        self._work.spans.append(Span(path))
        made = _made(result)
        if made is None or ledger.met != met:
            return result, None
        ledger.settle()
        new = {**live, current_account(): live[current_account()] + made[1]}
        if ledger.live != new:
            return result, None
        spans = tuple(dataclasses.replace(span) for span in self._work.spans[first:-1])
        results, structure = made[0], tree_flatten(result)[1]
        return result, _Effect(tuple(above), spans, path, times(), results, structure)

    def _again(self, effect: _Effect) -> Any:
        self._ledger.again(effect.above)
        path = self._ledger.path
        for span in effect.spans:
            inside = span.path == effect.path or span.path.startswith(f"{effect.path}.") or not effect.path
            sums = {name: value * times() // effect.times for name, value in vars(span).items() if name != "path"}
            self._work.add(Span(path + span.path[len(effect.path) :] if inside else span.path, **sums))
        return tree_unflatten([self._made_again(result) for result in effect.results], effect.structure)

    def _made_again(self, result: Any) -> Any:
        if not isinstance(result, _Made):
            return result
        fake = fake_empty(self._mode, result.shape, result.stride, result.dtype, CPU)
        self._ledger.book(fake, current_account())
        return fake

    def _given(self, arguments: Any) -> Hashable | None:
        """Of arguments, what a call hangs on; None where that cannot be told."""
        leaves, structure = tree_flatten(arguments)
        parts: list[Any] = [str(structure), torch.is_inference_mode_enabled(), current_account()]
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                parts.append((leaf.shape, leaf.stride(), leaf.dtype, self._ledger.account_of(leaf)))
            elif leaf is None or isinstance(leaf, (int, float, str, torch.dtype)):
                parts.append((type(leaf), leaf))
            else:
                return None
        return tuple(parts)


def _made(result: Any) -> tuple[tuple[Any, ...], int] | None:
    """How to make results again, and the bytes of their storages; None where they are no plain tensors of their own."""
    made: list[Any] = []
    storages: dict[int, int] = {}
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, FakeTensor) and leaf.constant is None:
            storage = leaf.untyped_storage()
            if storage._cdata in storages or storage.nbytes() != leaf.numel() * leaf.element_size():
                return None
            storages[storage._cdata] = storage.nbytes()
            made.append(_Made(leaf.shape, leaf.stride(), leaf.dtype))
        elif leaf is None or isinstance(leaf, (int, float, str)):
            made.append(leaf)
        else:
            return None
    return tuple(made), sum(storages.values())
