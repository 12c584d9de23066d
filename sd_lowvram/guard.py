"""Another size than planned (a hires fix) is planned anew before its first step, or refused there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .models.anatomy import Anatomy
from .patches import Patch, wrap
from .plans import Request
from .stages import scale_factor
from .weights import first_tensor

Replan = Callable[[int, int, int], None]


def guard(anatomy: Anatomy, request: Request, replan: Replan) -> Iterator[Patch]:
    """Watch the sizes that come to denoiser and autoencoder, and call ``replan(width, height, batch)`` for larger ones.

    The call goes on afterwards with what is attached then; an exception of ``replan`` reaches the caller instead.
    """
    factor = scale_factor(anatomy)
    pictures = request.batch * (2 if request.guidance else 1)
    planned = pictures * request.width * request.height
    for name in (anatomy.denoiser, anatomy.autoencoder):
        for entry in anatomy.entries[name] if name else ():
            pixels_a_side = 1 if entry == "encode" else factor
            share = 1 if name == anatomy.denoiser else pictures // request.batch
            watch = functools.partial(
                _watch, anatomy.components[name or ""], entry, planned, pixels_a_side, share, replan
            )
            yield wrap(anatomy.components[name or ""], entry, watch, "guard")


def _watch(
    component: Any,
    entry: str,
    planned: int,
    scale: int,
    share: int,
    replan: Replan,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    x = first_tensor((args, kwargs))
    if x is None or isinstance(x, FakeTensor) or _pixels(x, scale) * share <= planned:
        return original(*args, **kwargs)
    pictures = len(x) * share
    replan(x.shape[3] * scale, x.shape[2] * scale, max(1, -(-pictures // 2)))
    return getattr(component, entry)(*args, **kwargs)


def _pixels(x: Tensor, scale: int) -> int:
    return len(x) * x.shape[2] * x.shape[3] * scale * scale if x.dim() == 4 else 0
