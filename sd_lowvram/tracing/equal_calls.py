"""Calls of equal modules: a trace runs the first, and repeats its figures for the rest.

A UNet's levels repeat their blocks, SDXL's ten times. On fake tensors the memory and work of a call depend on shapes
alone, so a call of another module with weights of the same shapes has the same figures. Streamed weights are copied and
dropped by a schedule: the engine still moves those of every call (:mod:`call_log`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import FakeTensor, FakeTensorMode, storage_key, tree_flatten, tree_unflatten
from ..memory.accounts import current_account
from ..memory.repeats import Follower, times
from ..patches import roles_of, set_patch, wrap
from ..streaming.weight_scopes import open_repeats
from ..weights import own_tensors
from .call_log import CallLog, Entry, Roles, as_one, ends_own, moves_in
from .flop_counter import ModuleWork
from .ledger import Ledger, Stretch
from .op_cache import Made, fake


def equal_modules(component: nn.Module) -> dict[nn.Module, int]:
    """Return the modules of which ``component`` has several equal ones, each with a number for its kind.

    Args:
        component: a model; only modules in its lists and sequences are compared.
    """
    lists = (module for module in component.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    listed = (member for module in lists for member in module if member is not None)  # Kandinsky 5 leaves gaps
    members = {member for member in listed if any(True for _ in member.children())}
    kinds = {member: _kind(member) for member in members}
    seen = Counter(kinds.values())
    numbers = {kind: number for number, kind in enumerate(seen)}
    return {member: numbers[kind] for member, kind in kinds.items() if seen[kind] > 1}


def _kind(block: nn.Module) -> Hashable:
    """Key of classes, numbers and shapes that a pass on fake tensors depends on.

    Values of the block's own numbers, such as its index in a list (Z-Image), and that index in a module inside (text
    encoders) are not part of the key; those that a call reads are recorded then."""
    return tuple(
        (
            type(module),
            tuple(
                (name, type(value) if module is block or name in _INDICES else value)
                for name, value in _numbers(module)
            ),
            type(getattr(module, "processor", None)),
            tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in own_tensors(module)),
            tuple(id(hook) for hooks in (module._forward_pre_hooks, module._forward_hooks) for hook in hooks.values()),
        )
        for module in block.modules()
    )


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers and words that are attributes of ``module``."""
    return ((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str)))


_INDICES = frozenset({"layer_idx"})
"""Names by which transformers stores the index of a block in the modules inside it, which a cache of keys reads."""


def _watched(block: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Numbers of a block and of modules inside that are no part of its kind, by module."""
    inside = (
        (module, {name: vars(module)[name] for name in _INDICES & vars(module).keys()}) for module in block.modules()
    )
    return {module: found for module, found in inside if found} | {block: dict(_numbers(block))}


@contextlib.contextmanager
def _read(block: nn.Module) -> Iterator[dict[tuple[int, str], Any]]:
    """Record the watched numbers of ``block`` that any code reads within the block, with their values.

    Readers may be its own methods, those of its parents, hooks or functions. A temporary subclass intercepts the
    reads. A number is named by the place of its module and its name."""
    places = {module: place for place, module in enumerate(block.modules())}
    read = dict[tuple[int, str], Any]()
    with contextlib.ExitStack() as stack:
        for module, numbers in _watched(block).items():
            stack.enter_context(_noting(module, numbers, places[module], read))
        yield read


@contextlib.contextmanager
def _noting(module: nn.Module, numbers: dict[str, Any], place: int, read: dict[tuple[int, str], Any]) -> Iterator[None]:
    kind = type(module)
    metatype: Any = type(kind)

    def noting(self: nn.Module, name: str) -> Any:
        if name == "__class__":
            return kind
        if name in numbers:
            read[place, name] = numbers[name]
        elif name == "__dict__" and sys._getframe(1).f_globals is not vars(torch.nn.modules.module):
            read.update({(place, number): value for number, value in numbers.items()})
        return kind.__getattribute__(self, name)

    names = {"__getattribute__": noting, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    object.__setattr__(module, "__class__", metatype(kind.__name__, (kind,), names))
    try:
        yield
    finally:
        object.__setattr__(module, "__class__", kind)


def _reads_equal(block: nn.Module, read: Mapping[tuple[int, str], Any]) -> bool:
    """True if ``block`` has the numbers that an equal block's call has read."""
    if not read:
        return True
    inside = list(block.modules()) if any(place for place, _ in read) else [block]
    return all(vars(inside[place]).get(name) == value for (place, name), value in read.items())


@dataclass(frozen=True)
class _Argument:
    """A result that is an argument, with its place among these."""

    place: int


@dataclass(frozen=True)
class _View:
    """A result with the number of its storage; if it does not fill the storage, it begins at an offset."""

    number: int
    layout: Made


@dataclass(frozen=True)
class _Results:
    """Results of a call.

    Attributes:
        storages: a tensor for each storage that the call made; ``moved``: bytes of these storages.
        parts: the results, in order.
        structure: containers of the results.
        kept: numbers of the allocations of ``storages``.
    """

    storages: tuple[Made, ...]
    parts: tuple[Any, ...]
    structure: Any
    moved: int
    kept: tuple[int, ...]

    def make(self, bases: Sequence[Tensor], mode: FakeTensorMode, arguments: Sequence[Any]) -> Any:
        """Make the results again.

        Args:
            bases: a new tensor for each storage.
            mode: makes the views.
            arguments: of the call.
        """
        leaves: list[Any] = []
        for part in self.parts:
            if isinstance(part, _Argument):
                leaves.append(arguments[part.place])
            elif isinstance(part, _View):
                base, layout = bases[part.number], part.layout
                whole = (base.shape, base.stride()) == (layout.shape, layout.stride)
                leaves.append(base if whole else fake(layout, mode, base))
            else:
                leaves.append(part)
        return tree_unflatten(leaves, self.structure)


@dataclass(frozen=True)
class _Call:
    """Record of a call.

    Attributes:
        log: what happened in it.
        roles: streamed blocks of the module.
        path: dotted name of the module.
        results: description of the results.
        before: bytes on the device at the start.
    """

    log: Sequence[Entry]
    roles: Roles
    path: str
    results: _Results
    before: int


class EqualCalls:
    """The recorded calls of one trace."""

    def __init__(self, ledger: Ledger, work: ModuleWork, mode: FakeTensorMode) -> None:
        """
        Args:
            ledger: books the bytes.
            work: counts the operations.
            mode: makes the fake results.
        """
        self._ledger, self._mode = ledger, mode
        self._log = CallLog(ledger, work)
        self._known: dict[Hashable, list[tuple[dict[tuple[int, str], Any], _Call | None]]] = {}

    @contextlib.contextmanager
    def run_once(self, modules: Mapping[nn.Module, int]) -> Iterator[Follower]:
        """Run one call of each kind within the block, and repeat its record for equal calls.

        Calls are equal if the kind of the module, its hooks and the shapes of the arguments are, and if its layers have
        streamed weights in the same places.

        Args:
            modules: modules with the number of their kind, from :func:`equal_modules`.

        Yields:
            The follower to notify of loops.
        """
        if not modules:
            yield self._ledger
            return
        kinds = {module: (number, *map(roles_of, module.modules())) for module, number in modules.items()}
        with self._log.listening(), contextlib.ExitStack() as stack:
            for module, kind in kinds.items():
                called = functools.partial(self._call, module, kind)
                stack.callback(set_patch(wrap(module, "forward", called, "equal calls")))
            yield self._log

    def _call(self, module: nn.Module, kind: Hashable, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments, roles = self._facts((args, kwargs)), self._log.roles(module)
        if arguments is None:
            return forward(*args, **kwargs)
        calls = self._known.setdefault((kind, arguments, roles.kind), [])
        for read, call in calls:
            if _reads_equal(module, read):
                return forward(*args, **kwargs) if call is None else self._repeat_call(call, roles, (args, kwargs))
        with _read(module) as read:
            result, call = self._first(forward, roles, args, kwargs)
        calls.append((read, call))
        return result

    def _facts(self, arguments: Any) -> Hashable | None:
        """Facts that a call depends on in addition to the module; None if they are unknown."""
        leaves, structure = tree_flatten(arguments)
        facts: list[Any] = [str(structure), torch.is_inference_mode_enabled(), current_account(), times()]
        facts.append(open_repeats() is None)
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                facts.append((leaf.shape, leaf.stride(), leaf.dtype, self._ledger.account_of(leaf)))
            elif leaf is None or isinstance(leaf, (int, float, str, torch.dtype)):
                facts.append((type(leaf), leaf))
            else:
                return None
        return tuple(facts)

    def _first(self, forward: Callable[..., Any], roles: Roles, args: Any, kwargs: Any) -> tuple[Any, _Call | None]:
        """Run a call; return its result and its record. The record is None if the call did more than that."""
        ledger, path = self._ledger, self._ledger.path
        before, met, place = ledger.live_now()["device"], ledger.met, len(ledger.allocations)
        leaves = tree_flatten((args, kwargs))[0]
        start = self._log.begin()
        try:
            result = forward(*args, **kwargs)
        finally:
            log = self._log.finish(start)
        # Autoencoders of frames write into their arguments what the next call needs.
        wrote = list(map(id, leaves)) != list(map(id, tree_flatten((args, kwargs))[0]))
        results = self._results(result, leaves)
        if results is None or ledger.met != met or wrote:
            return result, None
        changes = map(sum, zip(*(entry.changes for entry in log if isinstance(entry, Stretch)), strict=True))
        if [*changes][:3] != [results.moved, 0, 0]:
            return result, None
        moves, kept = moves_in(log), {*results.kept}
        if not kept <= {number for number, nbytes in ledger.allocations[place:] if nbytes >= 0}:
            return result, None  # views of what was there before
        if not moves:
            log = as_one(log, ledger.allocations[place:])
        elif not all(move.repeatable and move.block in roles.blocks for move in moves) or not ends_own(log, kept):
            return result, None
        return result, _Call(log, roles, path, results, before)

    def _results(self, result: Any, arguments: Sequence[Any]) -> _Results | None:
        """Describe a call's results, if they are new on the device, views of such, arguments, or numbers; else None."""
        leaves, structure = tree_flatten(result)
        storages: dict[int, tuple[Made, Tensor]] = {}
        parts: list[Any] = []
        for leaf in leaves:
            place = next((place for place, argument in enumerate(arguments) if argument is leaf), None)
            if place is not None and isinstance(leaf, Tensor):
                parts.append(_Argument(place))
            elif isinstance(leaf, FakeTensor):
                if (view := self._view(leaf, storages)) is None:
                    return None
                parts.append(view)
            elif leaf is None or isinstance(leaf, (int, float, str)):
                parts.append(leaf)
            else:
                return None
        tensors = [tensor for _, tensor in storages.values()]
        moved = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        kept = tuple(map(self._ledger.number_of, tensors))
        return _Results(tuple(made for made, _ in storages.values()), tuple(parts), structure, moved, kept)

    def _view(self, leaf: FakeTensor, storages: dict[int, tuple[Made, Tensor]]) -> _View | None:
        """Describe a result as a view of one of ``storages``, which gets its own; None if it is not on the device, or
        its storage is of another type."""
        if leaf.constant is not None or self._ledger.account_of(leaf) != "device":
            return None
        size, width = leaf.untyped_storage().nbytes(), leaf.element_size()
        layout = Made(leaf.shape, leaf.stride(), leaf.dtype, leaf.fake_device, int(leaf.storage_offset()))
        key = storage_key(leaf)
        if key not in storages:
            fills = leaf.numel() * width == size
            flat = Made((size // width,), (1,), leaf.dtype, leaf.fake_device, None)
            storages[key] = layout._replace(offset=None) if fills else flat, leaf
        if storages[key][0].dtype != leaf.dtype or size % width:
            return None
        return _View([*storages].index(key), layout)

    def _repeat_call(self, call: _Call, roles: Roles, arguments: Any) -> Any:
        more = self._ledger.live_now()["device"] - call.before
        numbers = self._log.repeat(call.log, (call.roles, roles), call.path, more)
        bases = [fake(made, self._mode, None) for made in call.results.storages]
        for number, base in zip(call.results.kept, bases, strict=True):
            self._ledger.adopt(base, numbers[number])
        return call.results.make(bases, self._mode, tree_flatten(arguments)[0])
