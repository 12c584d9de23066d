"""Calls of equal modules: a trace runs the first, and repeats its figures for the rest.

A UNet's levels repeat their blocks, SDXL's ten times. On fake tensors the memory and work of a call depend on shapes
alone, so a call of another module with weights of the same shapes has the same figures. This does not hold for streamed
weights, which are copied and dropped by a schedule: such models are traced whole.
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
from ..memory.repeats import times
from ..patches import roles_of, set_patch, wrap
from ..streaming.timing import ModuleSpan
from ..weights import own_tensors
from .flop_counter import ModuleWork
from .ledger import Ledger
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
        above: peaks during the call, less the bytes at its start.
        allocations: what was allocated and freed, by number.
        kept: numbers of the allocations that are the results.
        spans: the work, module by module.
        path: dotted name of the module.
        results: recipe of the results.
        before: bytes on the device at the start.
    """

    above: Sequence[int]
    allocations: Sequence[tuple[int, int]]
    kept: tuple[int, ...]
    spans: tuple[ModuleSpan, ...]
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
        self._ledger, self._work, self._mode = ledger, work, mode
        self._known: dict[Hashable, list[tuple[dict[str, Any], _Call | None]]] = {}

    @contextlib.contextmanager
    def run_once(self, modules: Mapping[nn.Module, int]) -> Iterator[None]:
        """Run one call of each kind within the block, and repeat its record for equal calls.

        Calls are equal if the kind of the module, its hooks and the shapes of the arguments are.

        Args:
            modules: modules with the number of their kind, from :func:`equal_modules`.
        """
        kinds = {module: (number, *map(roles_of, module.modules())) for module, number in modules.items()}
        with contextlib.ExitStack() as stack:
            for module, kind in kinds.items():
                called = functools.partial(self._call, module, kind)
                stack.callback(set_patch(wrap(module, "forward", called, "equal calls")))
            yield

    def _call(self, module: nn.Module, kind: Hashable, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = self._facts((args, kwargs))
        if arguments is None:
            return forward(*args, **kwargs)
        calls, own = self._known.setdefault((kind, arguments), []), vars(module)
        for read, call in calls:
            if all(own.get(name) == value for name, value in read.items()):
                return forward(*args, **kwargs) if call is None else self._repeat_call(call)
        with _read(module) as read:
            result, call = self._first(forward, args, kwargs)
        calls.append((read, call))
        return result

    def _facts(self, arguments: Any) -> Hashable | None:
        """Facts that a call depends on in addition to the module; None if they are unknown."""
        leaves, structure = tree_flatten(arguments)
        facts: list[Any] = [str(structure), torch.is_inference_mode_enabled(), current_account(), times()]
        for leaf in leaves:
            if isinstance(leaf, FakeTensor):
                facts.append((leaf.shape, leaf.stride(), leaf.dtype, self._ledger.account_of(leaf)))
            elif leaf is None or isinstance(leaf, (int, float, str, torch.dtype)):
                facts.append((type(leaf), leaf))
            else:
                return None
        return tuple(facts)

    def _first(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Call | None]:
        """Run a call; return its result and its record. The record is None if the call did more than that."""
        ledger, path = self._ledger, self._ledger.path
        live, met, first = ledger.live_now(), ledger.met, len(self._work.spans)
        place = len(ledger.allocations)
        self._work.spans.append(ModuleSpan(path))  # so that the call has spans of its own
        leaves = tree_flatten((args, kwargs))[0]
        with ledger.separate_peaks() as above:
            result = forward(*args, **kwargs)
        # Autoencoders of frames write into their arguments what the next call needs.
        wrote = list(map(id, leaves)) != list(map(id, tree_flatten((args, kwargs))[0]))
        spans = tuple(ModuleSpan(**vars(span)) for span in self._work.spans[first:])
        self._work.spans.append(ModuleSpan(path))
        results = self._new_tensors(result)
        if results is None or ledger.met != met or wrote:
            return result, None
        before = live["device"]
        live["device"] += results.moved
        if ledger.live_now() != live:
            return result, None
        numbers = tuple(ledger.number_of(tensor) for tensor in _tensors(result))
        return result, _Call(above, ledger.allocations[place:], numbers, spans, path, results, before)

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

    def _repeat_call(self, call: _Call) -> Any:
        self._ledger.repeat_peaks(call.above)
        here, there = self._ledger.path, call.path
        more = self._ledger.live_now()["device"] - call.before
        for span in call.spans:
            inside = not there or span.path == there or span.path.startswith(f"{there}.")
            path = here + span.path[len(there) :] if inside else span.path
            self._work.spans.append(ModuleSpan(**vars(span) | {"path": path, "held_bytes": span.held_bytes + more}))
        result = make(call.results, self._mode, (None,))
        self._ledger.repeat(call.allocations, dict(zip(call.kept, _tensors(result), strict=True)))
        return result


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
