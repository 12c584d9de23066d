"""Skip connections of a UNet are parked in host memory between the blocks that make them and the blocks that use them.

Source: ours for Stable Diffusion. Fidelity: ``bitwise``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private import tree_map
from ...errors import NoSiteError
from ...models.anatomy import Anatomy
from ...patches import Patch, wrap
from ...settings import Settings
from ...weights import needs_graph
from ..arguments import change_tensors
from ..offers import Offer, OfferKind, Target
from .offloaded_tensor import OffloadedMap, recall_value


def skip_parking(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Park the UNet's skip connections in host memory, and fetch them in its up blocks.

    With ``settings.guidance_in_turn`` every map between two modules is parked, so that only the half that is being
    computed is on the device. A ControlNet's residuals are added to skips that are fetched for it and parked again.

    Args:
        anatomy: modules on the path of its UNet's maps are patched.
        settings: ``guidance_in_turn`` is read.
        device: not read: maps go back to the device from which they came.

    Yields:
        One patch of ``forward`` for each module that makes or uses a parked map.

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
    """Offer parked skips for UNets, at level 2."""
    if target.anatomy.unet_path is not None:
        yield Offer(OfferKind.LADDER, {"park_skips": True}, level=2, stages=("denoise",))


def _through_host(module: nn.Module, parks: bool, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = change_tensors(args, kwargs, recall_value)  # only for reading: modules do not write to inputs
    result = original(*args, **kwargs)
    if not parks or needs_graph(module, args, kwargs):
        return result
    return tree_map(
        lambda leaf: OffloadedMap.park(leaf) if isinstance(leaf, Tensor) and leaf.ndim == 4 else leaf, result
    )
