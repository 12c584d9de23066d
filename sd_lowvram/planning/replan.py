"""Another size than planned (a hires fix) is planned anew before its first step, or refused there."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..weights import first_tensor
from .request import Request
from .stages import scale_factor

Replan = Callable[[int, int, int, int], None]
_replanning = threading.local()


def guard(anatomy: Anatomy, request: Request, replan: Replan) -> Iterator[Patch]:
    """Watch what comes to denoiser and autoencoder, and call ``replan(width, height, batch, passes)`` where it is more
    than was planned for: more pixels, more pictures, or more passes of guidance for each of them.

    The call goes on afterwards with what is attached then; an exception of ``replan`` reaches the caller instead.
    """
    factor = scale_factor(anatomy)
    for name in (anatomy.denoiser, anatomy.autoencoder):
        for entry in anatomy.entries[name] if name else ():
            scale = 1 if entry == "encode" else factor
            denoises = name == anatomy.denoiser
            watch = functools.partial(_watch, anatomy.components[name or ""], entry, request, denoises, scale, replan)
            yield wrap(anatomy.components[name or ""], entry, watch, "guard")


def _watch(
    component: Any,
    entry: str,
    request: Request,
    denoises: bool,
    scale: int,
    replan: Replan,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """One call of a component, ``scale`` pixels of the picture to a pixel of its input."""
    x = first_tensor((args, kwargs))
    planned = (request.shape.rows if denoises else request.batch) * request.width * request.height
    again = getattr(_replanning, "call", None) is x  # a plan that still is too small for it is not made twice
    if x is None or isinstance(x, FakeTensor) or again or _pixels(x, scale) <= planned:
        return original(*args, **kwargs)
    batch, passes = _rows_of_the_denoiser(len(x), request) if denoises else (len(x), request.passes)
    before, _replanning.call = getattr(_replanning, "call", None), x
    try:
        replan(x.shape[3] * scale, x.shape[2] * scale, batch, passes)
        return getattr(component, entry)(*args, **kwargs)
    finally:
        _replanning.call = before


def _rows_of_the_denoiser(came: int, request: Request) -> tuple[int, int]:
    """Pictures, and passes for each of them, that a batch of ``came`` rows may be; together no less than it."""
    if request.passes > 1 and came % request.passes == 0:
        return came // request.passes, request.passes
    return request.batch, -(-came // request.batch)


def _pixels(x: Tensor, scale: int) -> int:
    return len(x) * x.shape[2] * x.shape[3] * scale * scale if x.dim() == 4 else 0
