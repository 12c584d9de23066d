"""Skip connections wait in host memory from where they are made to where they are used.

Source: ours for Stable Diffusion. Fidelity: ``bitwise``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import tree_map
from ..errors import NoSiteError
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import needs_graph
from .arguments import changed
from .offers import Offer, OfferKind, Target
from .offloaded_tensor import OffloadedMap, recalled


def skip_parking(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Park what the UNet's down blocks hand to its up blocks, and fetch it there.

    With ``settings.guidance_in_turn`` every map between two modules waits, so that of the two halves only the one that
    is being computed is on the device. What a ControlNet adds to the skips is added in host memory's stead: fetched,
    added, parked again.

    Raises:
        NoSiteError: the target has no UNet.
    """
    path = anatomy.unet_path
    if path is None:
        raise NoSiteError("park skips: the model has no UNet")
    parked = {id(module) for module in (path.modules if settings.guidance_in_turn else path.makers)}
    for module in (*path.modules, *path.tail):
        parks = id(module) in parked
        around = functools.partial(_through_host, module, parks)
        yield wrap(module, "forward", around, "park_skips", "parks" if parks else "fetches")


def offers(target: Target) -> Iterator[Offer]:
    if target.anatomy.unet_path is not None:
        yield Offer(OfferKind.LADDER, {"park_skips": True}, level=2, stages=("denoise",))


def _through_host(module: nn.Module, parks: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = changed(args, kwargs, recalled)  # modules change no inputs: without parking these are the skips
    result = original(*args, **kwargs)
    if not parks or needs_graph(module, args, kwargs):
        return result
    return tree_map(lambda leaf: OffloadedMap.of(leaf) if isinstance(leaf, Tensor) and leaf.ndim == 4 else leaf, result)
