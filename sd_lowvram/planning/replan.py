"""Re-planning before the first step of a run that differs from its plan (the size of a hires fix, another model)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..compat.private import FakeTensor
from ..errors import BudgetError, PlanningError
from ..memory.accounts import tracing
from ..models.anatomy import Anatomy
from ..models.calls import LatentsInCall, map_in_call
from ..models.causal_autoencoder import FRAMES
from ..models.latents import scale_factor
from ..models.recorded import Rehearsal, Row, larger_tensors, row_of
from ..patches import Patch, wrap
from ..units import format_size
from .first_calls import add_first_call, add_larger_call, row_of_call
from .request import Request
from .stages import stated_calls

Replan = Callable[[int, int, int, int, int], None]
_replanning = threading.local()


def watch_sizes(anatomy: Anatomy, request: Request, replan: Replan) -> Iterator[Patch]:
    """Yield patches that call ``replan(width, height, batch, passes, frames)`` before a call that is larger than
    planned.

    Larger means more pixels, pictures, frames, or passes of guidance, or other conditions (an IP-Adapter that was
    loaded or unloaded). The call continues with what is attached then; an exception of ``replan`` is raised to the
    caller instead. A run whose calls were recorded has no such patches.

    Args:
        anatomy: parts of the target; denoiser and autoencoder are watched.
        request: what was planned for.
        replan: plans and attaches anew.
    """
    factor = scale_factor(anatomy)
    observed = request.rehearsal is not None or anatomy.family.arguments is not None
    for name in () if observed else (anatomy.denoiser, anatomy.autoencoder):
        component = anatomy.components[name or ""] if name else None
        for entry in anatomy.entries[name] if name else ():
            denoises = name == anatomy.denoiser
            conditions = anatomy.family.conditions if denoises else lambda _: None
            latents = anatomy.family.latents_in_call if denoises else map_in_call
            watch = _SizeWatch(
                component, entry, request, denoises, 1 if entry == "encode" else factor, latents, replan, conditions,
                conditions(component),
            )  # fmt: skip
            yield wrap(component, entry, watch, "size watch")


def watch_calls(anatomy: Anatomy, request: Request, replan: Callable[[Rehearsal], None]) -> Iterator[Patch]:
    """Yield patches that call ``replan(record)`` before a call that may need more than was planned.

    That is a call with a tensor that each recorded call lacks or has smaller.

    Args:
        anatomy: parts of the target, all of which are watched.
        request: what was planned for; without a record of its calls, or stated ones, there are no patches.
        replan: plans and attaches anew, for a record with the larger call.
    """
    record = request.rehearsal or stated_calls(anatomy, request.shape, request.encodes)
    if record is None:
        return
    for name in anatomy.components:
        for entry in anatomy.entries[name]:
            alike = [row for row in record.rows if (row.component, row.path, row.method) == (name, "", entry)]
            first = bool(record.why) and not alike
            watch = _CallWatch(anatomy, name, entry, request, record, alike, first, replan)
            yield wrap(anatomy.components[name], entry, watch, "size watch")


@dataclass(frozen=True)
class _CallWatch:
    """Looks at the calls of a model, of which those of ``rows`` were planned.

    A model that reads values can be traced with values that are on the CPU only. If they are on the GPU, a larger call
    runs as it is. So does a ``first`` call that cannot be traced at all."""

    anatomy: Anatomy
    name: str
    entry: str
    request: Request
    record: Rehearsal
    rows: list[Row]
    first: bool
    replan: Callable[[Rehearsal], None]
    seen: set[tuple[Any, ...]] = field(default_factory=set)

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = *_tensor_facts(args), *_named_facts(kwargs)
        if key in self.seen or tracing():
            return original(*args, **kwargs)
        given = self._by_name(args, kwargs)
        larger = [list(larger_tensors(given, self._by_name(row.args, row.kwargs))) for row in self.rows]
        if (self.first or all(larger)) and self._plan(min(larger, key=len, default=[]), args, kwargs):
            return getattr(self.anatomy.components[self.name], self.entry)(*args, **kwargs)
        self.seen.add(key)
        return original(*args, **kwargs)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by their names in the model's method, or by position if it does not take them."""
        method: Any = getattr(type(self.anatomy.components[self.name]), self.entry, None)
        with contextlib.suppress(TypeError, ValueError):
            signature = inspect.signature(method)
            if all(one.kind is not one.VAR_POSITIONAL for one in signature.parameters.values()):
                return signature.bind(None, *args, **kwargs).arguments
        return {**{f"argument {number}": value for number, value in enumerate(args, 1)}, **kwargs}

    def _plan(self, larger: list[tuple[str, int, int]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Plan anew for a call; return False if it cannot be traced.

        Args:
            larger: the tensors among its arguments that are larger than planned.

        Raises:
            BudgetError: the call does not fit.
        """
        reads_values = any(row.reads for row in self.rows)
        for reads in (False, True) if self.first else (reads_values,):
            try:
                self.replan(self._record_with(args, kwargs, reads))
                return True
            except BudgetError as error:
                error.args = (f"{self._occasion(larger)}: {error}",)
                raise
            except PlanningError:
                if not reads_values and not self.first:
                    raise
        return False

    def _occasion(self, larger: list[tuple[str, int, int]]) -> str:
        if self.first or not larger:
            return f"{self.name} is planned at its first call"
        tensor, given, planned = max(larger, key=lambda one: one[1] - one[2])
        more = f"more than planned ({format_size(planned)})" if planned else "for which nothing is planned"
        return f"{self.name} is called with {tensor} of {format_size(given)}, {more}"

    def _record_with(self, args: tuple[Any, ...], kwargs: dict[str, Any], reads: bool) -> Rehearsal:
        if not self.first:
            row = row_of(self.name, "", self.entry, None, args, kwargs, reads)
            return add_larger_call(self.anatomy, self.request, self.record, row, args, kwargs, self._by_name)
        row = row_of_call(self.anatomy, self.name, self.entry, args, kwargs, reads)
        return add_first_call(self.anatomy, self.request, row, args, kwargs)


def _tensor_facts(values: Iterable[Any]) -> Iterator[Any]:
    """Shapes, types and places of the tensors in nested containers, in a tenth of the time that torch takes to flatten
    them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value.shape
            yield value.dtype
        elif isinstance(value, (list, tuple)):
            yield len(value)
            yield from _tensor_facts(value)
        elif isinstance(value, dict):
            yield from _named_facts(value)
        else:
            yield None


def _named_facts(values: Mapping[Any, Any]) -> Iterator[Any]:
    for name, value in values.items():
        yield name
        yield from _tensor_facts((value,))


def exchanges(target: Any, anatomy: Anatomy, replan: Callable[[str, Any], object]) -> Iterator[Patch]:
    """Yield patches that call ``replan(name, model)`` when ``target`` has a new model in place of one of ``anatomy``.

    This is checked at the beginning of a run and at every call of the models. A removed model needs no new plan. The
    call continues with what is attached then; an exception of ``replan`` is raised to the caller.

    Args:
        target: the pipeline.
        anatomy: its parts when it was planned.
        replan: plans and attaches anew.
    """

    def look(owner: Any, entry: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = {} if tracing() else anatomy.family.unchecked_components_of(target)
        other = next((name for name, part in parts.items() if anatomy.components.get(name) is not part), None)
        if other is None:
            return original(*args, **kwargs)
        replan(other, parts[other])
        return getattr(owner, entry)(*args, **kwargs)

    watched = [(target, entry) for entry in anatomy.family.entry_methods if hasattr(target, entry)]
    watched += [(part, entry) for name, part in anatomy.components.items() for entry in anatomy.entries[name]]
    for owner, entry in watched:
        yield wrap(owner, entry, functools.partial(look, owner, entry), "exchanges")


@dataclass(frozen=True)
class _SizeWatch:
    """Looks at the calls of a component, ``scale`` pixels of the picture to a pixel of its input."""

    component: Any
    entry: str
    request: Request
    denoises: bool
    scale: int
    latents_in_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], LatentsInCall | None]
    replan: Replan
    conditions: Callable[[Any], object]
    planned_conditions: object

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        latents = self.latents_in_call(self.component, args, kwargs)
        again = latents is not None and getattr(_replanning, "call", None) is latents.latents
        if latents is None or isinstance(latents.latents, FakeTensor) or again:  # not planned twice
            return original(*args, **kwargs)
        request = self.request
        rows = request.shape.rows if self.denoises else request.batch
        planned = self._frames(request.frames)
        pixels, frames = rows * request.width * request.height, request.frames
        if latents.frames > planned or latents.rows * latents.area * latents.frames * self.scale**2 > pixels * planned:
            batch, passes = (
                _rows_of_the_denoiser(latents.rows, request) if self.denoises else (latents.rows, request.passes)
            )
            width, height = self._size(latents)
            frames = frames if latents.frames <= planned else self._latent_frames(latents.frames)
        elif self.conditions(self.component) is not self.planned_conditions:
            width, height, batch, passes = request.width, request.height, request.batch, request.passes
        else:
            return original(*args, **kwargs)
        before, _replanning.call = getattr(_replanning, "call", None), latents.latents
        try:
            self.replan(width, height, batch, passes, frames)
            return getattr(self.component, self.entry)(*args, **kwargs)
        finally:
            _replanning.call = before

    def _frames(self, latents: int) -> int:
        """Frames of what the entry takes, to some of the latents."""
        return 1 + FRAMES * (latents - 1) if self.entry == "encode" else latents

    def _latent_frames(self, frames: int) -> int:
        return 1 + -(-(frames - 1) // FRAMES) if self.entry == "encode" else frames

    def _size(self, latents: LatentsInCall) -> tuple[int, int]:
        """Width and height of a picture of no less than what came."""
        height, width = latents.size()
        return width * self.scale, max(height, -(-latents.area // width)) * self.scale


def _rows_of_the_denoiser(rows: int, request: Request) -> tuple[int, int]:
    """Pictures, and passes for each of them, that a batch of ``rows`` may be; together no less than it."""
    if request.passes > 1 and rows % request.passes == 0:
        return rows // request.passes, request.passes
    return request.batch, -(-rows // request.batch)
