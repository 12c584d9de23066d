"""What comes otherwise than planned (the size of a hires fix, a model in place of another) is planned anew before its
first step, or refused there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..memory.accounts import tracing
from ..models import begins, parts_of
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..weights import first_tensor
from .request import Request
from .stages import scale_factor

Replan = Callable[[int, int, int, int], None]
_replanning = threading.local()
_INPUTS = ("sample", "x", "z")
"""What denoisers and autoencoders call their first argument, where a caller names it and in whatever order."""


def guard(anatomy: Anatomy, request: Request, replan: Replan) -> Iterator[Patch]:
    """Watch what comes to denoiser and autoencoder, and call ``replan(width, height, batch, passes)`` where it is more
    than was planned for: more pixels, more pictures, more passes of guidance for each of them, or other conditions (an
    IP-Adapter that was loaded or unloaded since).

    The call goes on afterwards with what is attached then; an exception of ``replan`` reaches the caller instead.
    """
    factor = scale_factor(anatomy)
    for name in (anatomy.denoiser, anatomy.autoencoder):
        component = anatomy.components[name or ""] if name else None
        for entry in anatomy.entries[name] if name else ():
            denoises = name == anatomy.denoiser
            conditions = anatomy.verbs.conditions if denoises else lambda _: None
            watch = _Watch(
                component, entry, request, denoises, 1 if entry == "encode" else factor, replan,
                conditions, conditions(component),
            )  # fmt: skip
            yield wrap(component, entry, watch, "guard")


def exchanges(target: Any, anatomy: Anatomy, replan: Callable[[str, Any], object]) -> Iterator[Patch]:
    """Watch whether ``target`` still has the models of ``anatomy``, where a run of it begins and at every call of
    these, and call ``replan(name, model)`` where another model has come in place of one or beside them.

    A model that was taken away needs no other plan. The call goes on with what is attached then; an exception of
    ``replan`` reaches the caller instead.
    """

    def look(owner: Any, entry: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parts = {} if tracing() else parts_of(anatomy.family, target)
        other = next((name for name, part in parts.items() if anatomy.components.get(name) is not part), None)
        if other is None:
            return original(*args, **kwargs)
        replan(other, parts[other])
        return getattr(owner, entry)(*args, **kwargs)

    watched = [(target, entry) for entry in begins(anatomy.family, target)]
    watched += [(part, entry) for name, part in anatomy.components.items() for entry in anatomy.entries[name]]
    for owner, entry in watched:
        yield wrap(owner, entry, functools.partial(look, owner, entry), "exchanges")


@dataclass(frozen=True)
class _Watch:
    """Looks at the calls of a component, ``scale`` pixels of the picture to a pixel of its input."""

    component: Any
    entry: str
    request: Request
    denoises: bool
    scale: int
    replan: Replan
    conditions: Callable[[Any], object]
    planned: object

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x = _input(args, kwargs)
        again = getattr(_replanning, "call", None) is x  # a plan that still is too small for it is not made twice
        if x is None or isinstance(x, FakeTensor) or again:
            return original(*args, **kwargs)
        request = self.request
        rows = request.shape.rows if self.denoises else request.batch
        if _pixels(x, self.scale) > rows * request.width * request.height:
            batch, passes = _rows_of_the_denoiser(len(x), request) if self.denoises else (len(x), request.passes)
            width, height = x.shape[3] * self.scale, x.shape[2] * self.scale
        elif self.conditions(self.component) is not self.planned:
            width, height, batch, passes = request.width, request.height, request.batch, request.passes
        else:
            return original(*args, **kwargs)
        before, _replanning.call = getattr(_replanning, "call", None), x
        try:
            self.replan(width, height, batch, passes)
            return getattr(self.component, self.entry)(*args, **kwargs)
        finally:
            _replanning.call = before


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The map that a component is called with: by position, or by the names that the families give it."""
    named = (kwargs[name] for name in _INPUTS if name in kwargs)
    return first_tensor(args) if args else first_tensor(list(named))


def _rows_of_the_denoiser(came: int, request: Request) -> tuple[int, int]:
    """Pictures, and passes for each of them, that a batch of ``came`` rows may be; together no less than it."""
    if request.passes > 1 and came % request.passes == 0:
        return came // request.passes, request.passes
    return request.batch, -(-came // request.batch)


def _pixels(x: Tensor, scale: int) -> int:
    return len(x) * x.shape[2] * x.shape[3] * scale * scale if x.dim() == 4 else 0
