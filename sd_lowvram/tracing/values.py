"""Values of small tensors within a trace, for models that read some of their inputs: masks, lengths, ids.

Fake tensors have no contents, so that ``mask.sum().item()`` fails on them. Here the operators that see only tensors of
known values run on real copies too, and what is read of their results is known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.private import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    storage_key,
    tree_flatten,
    tree_map,
    without_modes,
)
from ..memory.fake_mode import active_fake_mode
from ..memory.storage_refs import Deaths
from ..memory.threads import Redirected
from ..models.calls import SAFETY_CHECKER
from ..models.recorded import Row
from ..models.support import reads_values
from ..weight_parts import is_wrapper
from .fake_tensors import fake_of
from .uncompiled import Uncompiled

_INDEX = torch.ops.aten.index.Tensor
_MOST = 1 << 16
"""Elements of the largest tensor whose values are known."""


def call_with_values(row: Row, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``original`` with fake tensors of which some values are known.

    A safety checker reads zeros where values are unknown: scores of pictures in which it finds nothing.

    Args:
        row: the recorded call, with contents of the tensors among its arguments.
        original: the function.
        args, kwargs: its arguments.

    Raises:
        Exception: torch's DataDependentOutputException if another value is read.
    """
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    mode = active_fake_mode(*tensors)
    if mode is None:
        return original(*args, **kwargs)
    known = _Values(mode)
    with without_modes():
        copies = [None if value is None else value.contiguous().clone() for value in row.values]
    for tensor, value in zip(tensors, copies, strict=True):
        if value is not None:
            known.note(tensor, value)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_TOLIST.to(known.list_of))
        if row.component == SAFETY_CHECKER:
            stack.enter_context(_NUMPY.to(lambda fake: known.known_or_zeros(fake).numpy()))
            stack.enter_context(_ITEM.to(lambda fake: known.known_or_zeros(fake).item()))
        stack.enter_context(known)
        return original(*args, **kwargs)


_TOLIST, _NUMPY, _ITEM = (Redirected(FakeTensor, name) for name in ("tolist", "numpy", "item"))


class _Values(Uncompiled):
    """Runs operators on known values, and on fake tensors in the modes below.

    Values are those of storages, because torch makes new objects of views.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._values: dict[int, Tensor] = {}
        self._deaths = Deaths(lambda key: self._values.pop(key, None))

    def note(self, fake: Tensor, real: Tensor) -> None:
        """Record that ``fake`` has the values of ``real``, a small tensor of the same strides."""
        self._deaths.look()
        if storage_key(fake) not in self._values and real.numel() <= _MOST:
            self._values[self._deaths.watch(fake.untyped_storage())] = real

    def known_values(self, tensor: Tensor) -> Tensor | None:
        """Values of a tensor; a real one has its own."""
        if is_wrapper(tensor):
            return None
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= _MOST and not tensor.is_meta else None
        self._deaths.look()
        whole = self._values.get(storage_key(tensor))
        if whole is None or whole.dtype != tensor.dtype:
            return None
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        last = sum((side - 1) * step for side, step in zip(*place[:2], strict=True)) + place[2]
        beyond = tensor.numel() and (last + 1) * tensor.element_size() > whole.untyped_storage().nbytes()
        return None if beyond else whole.as_strided(*place)

    def list_of(self, fake: FakeTensor) -> Any:
        """``fake.tolist()``, of known values at once: torch runs two operators for each element."""
        with without_modes():
            known = self.known_values(fake)
        return fake.tolist() if known is None else known.tolist()

    def known_or_zeros(self, fake: FakeTensor) -> Tensor:
        """Values of ``fake``; zeros if they are unknown."""
        with without_modes():
            known = self.known_values(fake)
            return torch.zeros(fake.shape, dtype=fake.dtype) if known is None else known

    supports_higher_order_operators = True  # read by torch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _tensors((*args, *kwargs.values()))
        real = self._computable(func, args, leaves)
        if real is None:
            return func(*self._unknown_arguments(func, args, leaves), **kwargs)
        with without_modes():
            its_args, its_kwargs = tree_map(lambda leaf: real.get(id(leaf), leaf), (args, _cpu_arguments(kwargs)))
            try:
                value = func(*its_args, **its_kwargs)
            except Exception:  # it fails on fake tensors too, or is not for a CPU
                return func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0]):
            return value
        return self._on_fakes(func, args, kwargs, value)

    def _computable(self, func: Any, args: tuple[Any, ...], leaves: list[Tensor]) -> dict[int, Tensor] | None:
        """Values of all tensors by id, if the operator is to run on them too; else None."""
        if isinstance(func, HigherOrderOperator) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        writes = func._schema.is_mutable and not _is_fake(leaves)
        return self._all_known(leaves) if _is_small(args) and not writes else None

    def _unknown_arguments(self, func: Any, args: tuple[Any, ...], leaves: list[Tensor]) -> tuple[Any, ...]:
        """The arguments of an operator whose result has no known values."""
        if func is _INDEX:  # rows of a large tensor
            return args[0], [place for index in args[1] for place in self._places_of(index)]
        if not isinstance(func, HigherOrderOperator) and func._schema.is_mutable and _is_fake(leaves):
            self._values.pop(storage_key(leaves[0]), None)
        return args

    def _places_of(self, index: Tensor | None) -> Iterable[Tensor | None]:
        """The places that a known mask selects, in each of its dimensions; any other index as it is."""
        if not isinstance(index, FakeTensor) or index.dtype != torch.bool:
            return (index,)
        with without_modes():
            mask = self.known_values(index)
            return (index,) if mask is None else [self._fake(places) for places in mask.nonzero(as_tuple=True)]

    def _all_known(self, leaves: Sequence[Tensor]) -> dict[int, Tensor] | None:
        """Values of all tensors by id; None if those of one are unknown."""
        self._deaths.look()
        if any(isinstance(leaf, FakeTensor) and storage_key(leaf) not in self._values for leaf in leaves):
            return None  # as for most operators: leaving the modes takes longer
        with without_modes():
            values = {id(leaf): self.known_values(leaf) for leaf in leaves}
        known = {key: value for key, value in values.items() if value is not None}
        return known if len(known) == len(values) else None

    def _on_fakes(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        """Return the result of an operator on fake tensors, which has the values of ``value`` from now on."""
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not reads_values(error):
                raise
            result = tree_map(self._fake, value)  # its shape depends on values
        for fake, leaf in zip(tree_flatten(result)[0], tree_flatten(value)[0], strict=True):
            if isinstance(fake, FakeTensor):
                self.note(fake, leaf)
        return result

    def _fake(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with without_modes():
            return fake_of(leaf, self._mode)


def _tensors(args: Iterable[Any]) -> list[Tensor]:
    """Tensors among the arguments of an operator, which takes them one by one or in lists."""
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)):
            tensors += [leaf for leaf in arg if isinstance(leaf, Tensor)]
    return tensors


def _is_fake(leaves: list[Tensor]) -> bool:
    """True for the arguments of an operator that writes to a fake tensor, if it writes."""
    return isinstance(next(iter(leaves), None), FakeTensor)


def _cpu_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _is_small(args: tuple[Any, ...]) -> bool:
    """False for a factory of a large tensor."""
    for arg in args:
        if isinstance(arg, (list, tuple)) and arg and all(type(side) is int for side in arg):
            return bool(math.prod(max(1, side) for side in arg) <= _MOST)
    return all(not isinstance(arg, (int, float)) or arg <= _MOST for arg in args[:2])
