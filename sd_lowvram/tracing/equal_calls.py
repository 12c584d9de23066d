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

from ..compat.private import FakeTensor, FakeTensorMode, storage_key, tree_flatten
from ..memory.accounts import current_account
from ..memory.repeats import Follower, times
from ..patches import roles_of, set_patch, wrap
from ..streaming.weight_scopes import open_repeats
from ..weights import own_tensors
from .call_log import CallLog, Entry, Roles, as_one, ends_own, moves_in
from .flop_counter import ModuleWork
from .ledger import Ledger, Stretch
from .op_cache import Recipe, make, recipe_for


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

    Values of the block's own numbers, such as its index in a list (Z-Image), are not part of the key; those that a call
    reads are recorded then."""
    return tuple(
        (
            type(module),
            tuple((name, type(value) if module is block else value) for name, value in _numbers(module)),
            type(getattr(module, "processor", None)),
            tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in own_tensors(module)),
            tuple(id(hook) for hooks in (module._forward_pre_hooks, module._forward_hooks) for hook in hooks.values()),
        )
        for module in block.modules()
    )


def _numbers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Numbers and words that are attributes of ``module``."""
    return ((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str)))


@contextlib.contextmanager
def _read(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the numbers of ``module`` that any code reads within the block, with their values.

    Readers may be its own methods, those of its parents, hooks or functions. A temporary subclass intercepts the
    reads."""
    kind, read = type(module), dict[str, Any]()
    metatype: Any = type(kind)
    numbers = dict(_numbers(module))

    def noting(self: nn.Module, name: str) -> Any:
        if name == "__class__":
            return kind
        if name in numbers:
            read[name] = numbers[name]
        elif name == "__dict__" and sys._getframe(1).f_globals is not vars(torch.nn.modules.module):
            read.update(numbers)
        return kind.__getattribute__(self, name)

    names = {"__getattribute__": noting, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    object.__setattr__(module, "__class__", metatype(kind.__name__, (kind,), names))
    try:
        yield read
    finally:
        object.__setattr__(module, "__class__", kind)


@dataclass(frozen=True)
class _Call:
    """Record of a call.

    Attributes:
        log: what happened in it.
        roles: streamed blocks of the module.
        kept: numbers of the allocations that are the results.
        path: dotted name of the module.
        results: recipe of the results.
        before: bytes on the device at the start.
    """

    log: Sequence[Entry]
    roles: Roles
    kept: tuple[int, ...]
    path: str
    results: Recipe
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
        self._known: dict[Hashable, list[tuple[dict[str, Any], _Call | None]]] = {}

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
        calls, own = self._known.setdefault((kind, arguments, roles.kind), []), vars(module)
        for read, call in calls:
            if all(own.get(name) == value for name, value in read.items()):
                return forward(*args, **kwargs) if call is None else self._repeat_call(call, roles)
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
        results = self._new_tensors(result)
        if results is None or ledger.met != met or wrote:
            return result, None
        changes = map(sum, zip(*(entry.changes for entry in log if isinstance(entry, Stretch)), strict=True))
        if [*changes][:3] != [results.moved, 0, 0]:
            return result, None
        kept = tuple(ledger.number_of(tensor) for tensor in _tensors(result))
        moves = moves_in(log)
        if not moves:
            log = as_one(log, ledger.allocations[place:])
        elif not all(move.repeatable and move.block in roles.blocks for move in moves) or not ends_own(log, {*kept}):
            return result, None
        return result, _Call(log, roles, kept, path, results, before)

    def _new_tensors(self, result: Any) -> Recipe | None:
        """Return the recipe of a call's results if they are new tensors on the device that fill their memory; else
        None.
        """
        recipe = recipe_for(result, None, view=False)
        if recipe is None:
            return None
        container, tensors = (None, (result,)) if isinstance(result, Tensor) else (type(result), result)
        storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        own = [tensor.numel() * tensor.element_size() for tensor in tensors] == [*storages.values()]
        own = own and all(self._ledger.account_of(tensor) == "device" for tensor in tensors)
        return Recipe(recipe, container, moved=sum(storages.values())) if own else None

    def _repeat_call(self, call: _Call, roles: Roles) -> Any:
        more = self._ledger.live_now()["device"] - call.before
        numbers = self._log.repeat(call.log, (call.roles, roles), call.path, more)
        result = make(call.results, self._mode, (None,))
        for number, tensor in zip(call.kept, _tensors(result), strict=True):
            self._ledger.adopt(tensor, numbers[number])
        return result


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
