"""What a call of a module did in a trace, so that an equal call need not run again.

On fake tensors a call hangs on shapes alone: what it held above what was there before, what it had to compute, and what
it gave are the same the next time, in another module with weights of the same shapes too. What else happens in a call
and changes more than that (who streams weights hears of the layers) goes through :func:`happen`, and happens in its
order although the call is left out.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..memory.accounts import Account, current_account
from ..memory.repeats import standing_for, times
from .fake_tensors import CPU, fake_empty
from .flop_counter import Span, Work
from .ledger import Ledger


class Carrier(abc.ABC):
    """What holds tensors and stands in their place among the arguments and results of modules."""

    @abc.abstractmethod
    def carried(self) -> list[Tensor]:
        """The tensors."""

    @abc.abstractmethod
    def form(self) -> Hashable:
        """All that it is besides them."""

    @classmethod
    @abc.abstractmethod
    def of_form(cls, form: Any, tensors: Sequence[Tensor]) -> Carrier:
        """One of the same form around other tensors."""


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


def once(kind: Hashable, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``run(*args, **kwargs)``; inside a short trace, where an equal call ran before, what that did.

    Args:
        kind: all that the call hangs on besides its arguments.
        module: that is called.
    """
    return run(*args, **kwargs) if _state.effects is None else _state.effects.once(kind, module, run, args, kwargs)


def happen(what: Callable[..., Any], *modules: nn.Module) -> None:
    """``what(*modules)``, also in calls that are left out: there with the modules in the same places."""
    if _state.effects is not None:
        _state.effects.note(_Happening(what, modules, times()))
    what(*modules)


def aside() -> contextlib.AbstractContextManager[None]:
    """Inside, what a trace counts belongs to no call, and is not done again where a call is left out."""
    return contextlib.nullcontext() if _state.effects is None else _state.effects.aside()


@dataclass(frozen=True)
class _Made:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    account: Account


@dataclass(frozen=True)
class _Carried:
    kind: type[Carrier]
    form: Hashable
    tensors: tuple[_Made, ...]


@dataclass(frozen=True)
class _Happening:
    """``modules``: themselves, or their places in the one that is called; ``times``: how many passes it stood for."""

    what: Callable[..., None]
    modules: tuple[Any, ...]
    times: int


@dataclass(frozen=True)
class _Effect:
    """``above``: peaks over what was there; ``path`` and ``times``: of the module that ran, and of the loops around."""

    above: tuple[int, ...]
    spans: tuple[Span, ...]
    path: str
    times: int
    results: tuple[Any, ...]
    structure: TreeSpec
    happened: tuple[_Happening, ...]


class Effects:
    """The calls of one trace."""

    def __init__(self, ledger: Ledger, work: Work, mode: FakeTensorMode) -> None:
        self._ledger, self._work, self._mode = ledger, work, mode
        self._known: dict[Any, _Effect | None] = {}
        self._notes: list[list[_Happening]] = []
        self._members: dict[nn.Module, list[nn.Module]] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, :func:`once` knows of these calls, if traces are to be short."""
        before, _state.effects = _state.effects, self if _state.short else None
        try:
            yield
        finally:
            _state.effects = before

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return self._work.aside()

    def note(self, happening: _Happening) -> None:
        """Note for all calls under way that this happens in them."""
        for notes in self._notes:
            notes.append(happening)

    def once(self, kind: Hashable, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = self._given((args, kwargs))
        if given is None:
            return run(*args, **kwargs)
        key = kind, given
        if key not in self._known:
            result, self._known[key] = self._noted(module, run, args, kwargs)
            return result
        effect = self._known[key]
        return run(*args, **kwargs) if effect is None else self._again(effect, module)

    def _noted(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Effect | None]:
        """The result of the call, and its effect; None where it did more than to make its results."""
        ledger, path = self._ledger, self._ledger.path
        ledger.settle()
        live, met, first = dict(ledger.live), ledger.met, len(self._work.spans)
        self._work.spans.append(Span(path))  # what comes is not added to the span before
        self._notes.append([])
        try:
            with ledger.apart() as above:
                result = run(*args, **kwargs)
        finally:
            happened = self._placed(self._notes.pop(), module)
        self._work.spans.append(Span(path))
        made = None if happened is None or ledger.met != met else self._made(result)
        ledger.settle()
        if made is None or ledger.live != {name: nbytes + made[1][name] for name, nbytes in live.items()}:
            return result, None
        spans = tuple(span.at(span.path) for span in self._work.spans[first:-1])
        assert happened is not None
        results, structure = made[0], tree_flatten(result)[1]
        return result, _Effect(tuple(above), spans, path, times(), results, structure, happened)

    def _placed(self, notes: list[_Happening], module: nn.Module) -> tuple[_Happening, ...] | None:
        """What happened in a call of ``module``, told by places in it; None if to a module outside of it."""
        places = {member: place for place, member in enumerate(self._modules(module))} if notes else {}
        if not all(member in places for note in notes for member in note.modules):
            return None
        return tuple(
            _Happening(note.what, tuple(places[member] for member in note.modules), note.times // times())
            for note in notes
        )

    def _modules(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._members:
            self._members[module] = list(module.modules())
        return self._members[module]

    def _again(self, effect: _Effect, module: nn.Module) -> Any:
        for one in effect.happened:
            with standing_for(one.times):
                happen(one.what, *(self._modules(module)[place] for place in one.modules))
        self._ledger.again(effect.above)
        path, before = self._ledger.path, effect.path
        for span in effect.spans:
            inside = not before or span.path == before or span.path.startswith(f"{before}.")
            here = path + span.path[len(before) :] if inside else span.path
            self._work.add(span.at(here, times(), effect.times))
        return tree_unflatten([self._made_again(result) for result in effect.results], effect.structure)

    def _made(self, result: Any) -> tuple[tuple[Any, ...], Counter[str]] | None:
        """How to make results again, and the bytes of their storages in each account; None where they are no plain
        tensors of their own."""
        made: list[Any] = []
        storages: set[int] = set()
        sizes: Counter[str] = Counter()
        for leaf in tree_flatten(result)[0]:
            if leaf is None or isinstance(leaf, (int, float, str)):
                made.append(leaf)
                continue
            parts = []
            for tensor in leaf.carried() if isinstance(leaf, Carrier) else [leaf]:
                if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
                    return None
                storage = tensor.untyped_storage()
                if storage._cdata in storages or storage.nbytes() != tensor.numel() * tensor.element_size():
                    return None
                storages.add(storage._cdata)
                account = self._ledger.account_of(tensor)
                sizes[account] += storage.nbytes()
                parts.append(_Made(tensor.shape, tensor.stride(), tensor.dtype, account))
            made.append(_Carried(type(leaf), leaf.form(), tuple(parts)) if isinstance(leaf, Carrier) else parts[0])
        return tuple(made), sizes

    def _made_again(self, result: Any) -> Any:
        if isinstance(result, _Carried):
            return result.kind.of_form(result.form, [self._made_again(tensor) for tensor in result.tensors])
        if not isinstance(result, _Made):
            return result
        fake = fake_empty(self._mode, result.shape, result.stride, result.dtype, CPU)
        self._ledger.book(fake, result.account)
        return fake

    def _given(self, arguments: Any) -> Hashable | None:
        """Of arguments, what a call hangs on; None where that cannot be told."""
        leaves, structure = tree_flatten(arguments)
        parts: list[Any] = [str(structure), torch.is_inference_mode_enabled(), current_account()]
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                parts.append(self._facts(leaf))
            elif isinstance(leaf, Carrier):
                parts.append((type(leaf), leaf.form(), *map(self._facts, leaf.carried())))
            elif leaf is None or isinstance(leaf, (int, float, str, torch.dtype)):
                parts.append((type(leaf), leaf))
            else:
                return None
        return tuple(parts)

    def _facts(self, tensor: Tensor) -> Hashable:
        return tensor.shape, tensor.stride(), tensor.dtype, self._ledger.account_of(tensor)
