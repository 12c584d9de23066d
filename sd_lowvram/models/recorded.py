"""The record of a pipeline's own call: which of its models are called, with what, how often, in which order."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..compat.private import FakeTensor, tree_flatten, tree_map


@dataclass(frozen=True)
class Given:
    """A tensor of a recorded call.

    Attributes:
        shape, dtype: its shape and type.
        value: its contents, if it is small.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def describe_tensors(tree: Any) -> Any:
    """Return ``tree`` with a :class:`Given` in place of each tensor."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Given(tuple(leaf.shape), leaf.dtype, _value_of(leaf))

    return tree_map(describe, tree)


def _value_of(tensor: Tensor) -> Tensor | None:
    """A copy of the contents of a small tensor that has some."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.device.type != "cpu" or tensor.numel() > MOST_VALUES:
        return None
    return tensor.detach().clone()


MOST_VALUES = 1 << 14
"""Elements of the largest tensor whose contents are recorded."""


def _digest(leaf: Any) -> Any:
    """Whole numbers in a tensor, by which calls differ whose model reads them."""
    if not isinstance(leaf, Given) or leaf.value is None or leaf.dtype.is_floating_point:
        return None
    return hashlib.sha256(leaf.value.contiguous().view(-1).numpy().tobytes()).hexdigest()


def _comparable_leaf(leaf: Any) -> Any:
    """A leaf of a call's arguments as calls are compared by it: numbers with a fraction, such as times, are equal."""
    if leaf is None or isinstance(leaf, (bool, int, str, Given, torch.dtype)):
        return leaf
    return type(leaf).__qualname__


@dataclass(frozen=True)
class Row:
    """Calls of one model that are equal up to values.

    Attributes:
        component: name of the model.
        path: of the module in it that the pipeline calls; empty for the model itself.
        method: name of the method.
        dtype: type of the model's weights during the call.
        args, kwargs: arguments, with a :class:`Given` for each tensor.
        reads: True if the model reads values of its arguments.
        facts: everything of the arguments that matters to a trace.
        output_bytes: bytes of the result.
        size: height and width of the result, if it is a map.
        held: tensors that the pipeline holds besides during the call; of several calls the most.
        after_bytes: the most bytes that the pipeline holds from the call's end to the next call.
    """

    component: str
    path: str
    method: str
    dtype: torch.dtype | None
    args: tuple[Any, ...] = field(compare=False, repr=False)
    kwargs: dict[str, Any] = field(compare=False, repr=False)
    facts: tuple[Any, ...]
    output_bytes: int = field(compare=False)
    size: tuple[int, ...] = field(compare=False)
    reads: bool = False
    held: tuple[Given, ...] = field(default=(), compare=False)
    after_bytes: int = field(default=0, compare=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key by which calls are equal."""
        return self.component, self.path, self.method, self.dtype, self.facts

    @property
    def given_bytes(self) -> int:
        """Bytes of the tensors among the arguments."""
        return given_bytes((self.args, self.kwargs))

    @property
    def tensors(self) -> list[Given]:
        """The tensors among the arguments."""
        return _givens((self.args, self.kwargs))

    @property
    def control_maps(self) -> list[Given]:
        """The maps that a UNet is given by ControlNets, which lie in one buffer."""
        return _givens([self.kwargs.get(name) for name in CONTROL_MAPS])

    @property
    def adapter_maps(self) -> list[Given]:
        """The maps that a UNet is given by adapters."""
        return _givens(self.kwargs.get("down_intrablock_additional_residuals"))

    @property
    def values(self) -> list[Tensor | None]:
        """Contents of the tensors among the arguments, as far as they are known."""
        return [given.value for given in self.tensors]

    @property
    def held_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.held)

    def empties(self, dtype: torch.dtype) -> tuple[Any, Any, list[Tensor]]:
        """Empty tensors for a call: arguments, arguments by name, and what the pipeline holds besides.

        Args:
            dtype: type in which the model computes now; arguments of the type of its recorded weights get it.
        """

        def dtype_now(given: Given) -> torch.dtype:
            return dtype if given.dtype == self.dtype else given.dtype

        maps = {name: value for name, value in self.kwargs.items() if name in CONTROL_MAPS and value is not None}
        others = {name: value for name, value in self.kwargs.items() if name not in maps}
        args, kwargs = tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=dtype_now(leaf)) if isinstance(leaf, Given) else leaf,
            (self.args, others),
        )
        if givens := _givens(maps):
            sizes = [math.prod(given.shape) for given in givens]
            parts = iter(torch.empty(sum(sizes), dtype=dtype_now(givens[0])).split(sizes))
            kwargs |= tree_map(lambda leaf: next(parts).view(leaf.shape) if isinstance(leaf, Given) else leaf, maps)
        return args, kwargs, [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in self.held]


CONTROL_MAPS = ("down_block_additional_residuals", "mid_block_additional_residual")
"""Arguments of a UNet that ControlNets make."""


def _givens(tree: Any) -> list[Given]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Given)]


def given_bytes(tree: Any) -> int:
    """Bytes of the tensors, or of the :class:`Given`, in ``tree``."""
    leaves = tree_flatten(tree)[0]
    tensors = (leaf.nbytes if isinstance(leaf, Tensor) else leaf.bytes for leaf in leaves if isinstance(leaf, _SIZED))
    return sum(tensors)


_SIZED = (Tensor, Given)


def larger_tensors(call: Any, planned: Any, name: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield each tensor of ``call`` that has more bytes than the one in its place in ``planned``: name, both bytes.

    Args:
        call: arguments of a call; tensors of a few numbers, such as times, are left out.
        planned: arguments of a recorded call.
        name: name of the argument.
    """
    if isinstance(call, _SIZED):
        size, most = given_bytes(call), given_bytes(planned) if isinstance(planned, _SIZED) else 0
        if size > max(most, _SMALL):
            yield name, size, most
    elif isinstance(call, dict):
        named = planned if isinstance(planned, dict) else {}
        for key, value in call.items():
            yield from larger_tensors(value, named.get(key), str(key))
    elif isinstance(call, (list, tuple)):
        places = planned[: len(call)] if isinstance(planned, (list, tuple)) else ()
        for value, place in itertools.zip_longest(call, places):
            yield from larger_tensors(value, place, name)


_SMALL = 64
"""Bytes of the largest tensor that is left out when calls are compared: the time of up to eight rows."""


def row_of(
    component: str, path: str, method: str, dtype: torch.dtype | None, args: Any, kwargs: Any, reads: bool = False
) -> Row:
    """The row of one call, before its result is known."""
    args, kwargs = describe_tensors((args, kwargs))
    leaves, structure = tree_flatten((args, kwargs))
    facts = str(structure), *map(_comparable_leaf, leaves), *(map(_digest, leaves) if reads else ())
    return Row(component, path, method, dtype, args, kwargs, facts, output_bytes=0, size=(), reads=reads)


@dataclass(frozen=True, eq=False)
class Rehearsal:
    """The calls that a pipeline makes of its models.

    Attributes:
        rows: the different calls.
        order: all calls in their order, as numbers of rows.
        steps: models that are called in every step, in groups; those of a group take turns within a step.
        denoiser: the largest of them, or the model that bears a denoiser's name; empty if there is none.
        waiting: models that are planned at their first call, because the pipeline's call could not be rehearsed.
        why: the error of that rehearsal. With one, ``order`` has only first calls.
        stated: True if a family states the calls, once each, and none was rehearsed.
        asked: what :func:`~sd_lowvram.tracing.rehearsal.rehearse_filled` was asked after the pipeline.
    """

    rows: tuple[Row, ...]
    order: tuple[int, ...]
    steps: tuple[tuple[str, ...], ...] = ()
    denoiser: str = ""
    waiting: tuple[str, ...] = ()
    why: str = ""
    stated: bool = False
    asked: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def calls(self) -> list[Row]:
        """The row of every call, in order."""
        return [self.rows[number] for number in self.order]

    @property
    def counts(self) -> Counter[str]:
        """Number of calls of each model."""
        return Counter(row.component for row in self.calls)

    @property
    def control_maps(self) -> list[Given]:
        """The maps that ControlNets give to the denoiser; of several calls the most bytes."""
        rows = (row.control_maps for row in self.rows if row.component == self.denoiser)
        return max(rows, key=given_bytes, default=[])

    def times(self, rows: Iterable[Row]) -> int:
        """Number of calls of each of ``rows`` on average, at least 1; 0 if it is unknown."""
        if self.why or self.stated:
            return 0
        counted = list(rows)
        return max(1, round(sum(row in counted for row in self.calls) / max(1, len(counted))))

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the largest map that an autoencoder decodes; None if none does."""
        decoded = [row.size for row in self.calls if row.method == "decode" and len(row.size) == 2]
        height, width = max(decoded, key=math.prod, default=(0, 0))
        return (height, width) if decoded else None

    def waits_for(self, component: str, stage: str) -> bool:
        """Return True if a model's stage is planned when it is called first."""
        return component in self.waiting and stage != "encode"

    def add_larger(self, larger: Row, by_name: Callable[[Any, Any], Any] = lambda *both: both) -> Rehearsal:
        """Return a record that has ``larger`` too, a call with a larger tensor than each of its model's rows.

        Args:
            larger: the call. Tensors that are held next to it grow as its arguments do. Rows that are nowhere larger
                are replaced; without such rows the call is appended.
            by_name: function that sorts positional and keyword arguments in the same way for each call.
        """
        same_method = [row for row in self.rows if (row.component, row.path, row.method) == larger.key[:3]]
        if not same_method:
            most = max((row.held_bytes for row in self.rows), default=0)
            larger = replace(larger, held=(Given((most,), torch.uint8),))
            return replace(self, rows=(*self.rows, larger), order=(*self.order, len(self.rows)))
        least = max(same_method, key=lambda row: row.given_bytes)
        arguments = by_name(larger.args, larger.kwargs)
        grown = larger_tensors(arguments, by_name(least.args, least.kwargs))
        ratios = [size / planned for _, size, planned in grown if planned]
        growth = max(1.0, larger.given_bytes / max(1, least.given_bytes), *ratios)
        more = Given((math.ceil(least.held_bytes * (growth - 1)),), torch.uint8)
        larger = replace(
            larger,
            dtype=least.dtype,
            held=(*least.held, more),
            output_bytes=math.ceil(least.output_bytes * growth),
            size=larger.size or least.size,
            after_bytes=math.ceil(least.after_bytes * growth),
        )
        covered = [row for row in same_method if not any(larger_tensors(by_name(row.args, row.kwargs), arguments))]
        if not covered:
            return replace(self, rows=(*self.rows, larger), order=(*self.order, len(self.rows)))
        replaced = [larger if row in covered else row for row in self.rows]
        rows = tuple(dict.fromkeys(replaced))
        return replace(self, rows=rows, order=tuple(rows.index(replaced[number]) for number in self.order))


def steps_of(order: list[str], repeated: Callable[[str], bool]) -> tuple[tuple[str, ...], ...]:
    """Group the models that are called in every step: those that alternate are one group.

    Args:
        order: names of the models in the order of their calls.
        repeated: function that returns True for a model that is called in every step.
    """
    runs = [name for name, _ in itertools.groupby(filter(repeated, order))]
    groups: list[list[str]] = [[name] for name in dict.fromkeys(runs)]
    for name in dict.fromkeys(runs):
        places = [number for number, run in enumerate(runs) if run == name]
        between = set(runs[places[0] : places[-1] + 1])
        joined = [group for group in groups if between.intersection(group)]
        groups = [group for group in groups if group not in joined]
        groups.append([name for group in joined for name in group])
    first = {name: number for number, name in reversed(list(enumerate(runs)))}
    return tuple(sorted((tuple(sorted(group, key=first.__getitem__)) for group in groups), key=lambda g: first[g[0]]))
