"""Copy the maps of a ControlNet into one buffer, which the pipeline holds in place of the maps.

Single maps would lie between freed tensors, and each would keep a segment of the GPU's memory. The next maps go into
the same buffer, once the denoiser was called: those of the step before are then empty tensors. Fidelity: ``bitwise``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import is_compiling
from ..compat.private import tree_flatten
from ..memory.accounts import tracing
from ..memory.caching_allocator import LEAST
from ..memory.reserved import bytes_to_ask_for
from ..memory.segments import release_segments
from ..models.anatomy import Anatomy
from ..models.calls import CONTROL
from ..patches import Patch, wrap
from ..weights import map_tensors, set_data


def joined_maps(anatomy: Anatomy) -> Iterator[Patch]:
    """Yield patches of a ControlNet and its UNet."""
    control, denoiser = anatomy.components.get(CONTROL), anatomy.denoiser_module
    if control is not None and denoiser is not None and anatomy.unet_path is not None:
        maps = _maps.setdefault(control, _Maps())
        yield wrap(control, "forward", maps.join, "joined_maps")
        yield wrap(denoiser, "forward", maps.use, "joined_maps")


class _Maps:
    """The maps that a ControlNet made last."""

    def __init__(self) -> None:
        self._views: list[weakref.ref[Tensor]] = []
        self._used = False

    def use(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the denoiser."""
        self._used = True
        return original(*args, **kwargs)

    def join(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the ControlNet; return its maps as views of one buffer, unless autograd follows them."""
        result = original(*args, **kwargs)
        maps = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        plain = all(type(one) is Tensor and one.device == maps[0].device and not one.requires_grad for one in maps)
        if not maps or not plain or tracing() or is_compiling()():
            return result
        views = _views(self._buffer(maps), maps)
        for view, one in zip(views, maps, strict=True):
            view.copy_(one)
        self._views, self._used = list(map(weakref.ref, views)), False
        places = iter(views)
        return map_tensors(result, lambda _: next(places))

    def _buffer(self, maps: list[Tensor]) -> Tensor:
        """Return the buffer of the step before, or a new one if it is not free, or of another kind."""
        size, device = bytes_to_ask_for(sum(map(_place_bytes, maps))), maps[0].device
        before = [view for view in (reference() for reference in self._views) if view is not None]
        if before and self._used:
            storage, inference = before[0].untyped_storage(), before[0].is_inference()
            now = size, device, torch.is_inference_mode_enabled()
            if (storage.nbytes(), storage.device, inference) == now:
                for view in before:
                    set_data(view, view.new_empty(0))
                return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        release_segments(device)  # the buffer would take a part of a larger one, for all steps
        return torch.empty(size, dtype=torch.uint8, device=device)


_maps: weakref.WeakKeyDictionary[nn.Module, _Maps] = weakref.WeakKeyDictionary()
"""By ControlNet, as its pipeline holds maps when another plan is attached."""


def _views(buffer: Tensor, maps: list[Tensor]) -> list[Tensor]:
    """Parts of ``buffer`` with the shapes, types and memory orders of ``maps``."""
    views, place = [], 0
    for one in maps:
        part = buffer[place : place + one.nbytes].view(one.dtype)
        views.append(part.as_strided(one.shape, torch.empty_like(one, device="meta").stride()))
        place += _place_bytes(one)
    return views


def _place_bytes(one: Tensor) -> int:
    return -(-one.nbytes // LEAST) * LEAST
