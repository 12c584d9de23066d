"""What a host that moves weights itself leaves of them on the device while a component runs.

AUTOMATIC1111 has one component there with --medvram, and of the UNet one block with --lowvram; Forge and reForge fill
what is free and fetch the other layers for their call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modules import shared
from torch import nn

from sd_lowvram.devices.info import free_vram
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.units import format_size
from sd_lowvram.weights import all_tensors, weight_bytes

from . import host
from .estimate import BREAKS, DECIDES

_BLOCKS = ("time_embed", "input_blocks", "middle_block", "output_blocks")


def ways(model: Any, found: Anatomy) -> Iterator[dict[str, int]]:
    """The bytes of each component that stay, by name, from the fastest of the host's ways to the one that leaves least.

    A component that is not named stays whole.
    """
    if host.swaps_layers(model):
        yield {}
        yield {name: _two_layers(component) for name, component in found.components.items()}
    elif found.unet is not None and getattr(shared.cmd_opts, "lowvram", False):
        yield {found.denoiser or "": _largest_block(found.unet)}
    else:
        yield {}


_FOR_INFERENCE = 1 << 30
"""Bytes that Forge and reForge leave free beside the weights, unless their own sliders say otherwise."""


def decision(found: Anatomy, fetched: bool) -> str:
    """What Forge and reForge will keep of the model on the device, which they decide by what is free there.

    Args:
        fetched: whether the plan is for layers that are fetched, as the budget cannot hold the largest component.
    """
    where = host.device()
    parts = list(found.components.values())
    weights = {id(tensor): tensor.numel() * tensor.element_size() for tensor in all_tensors(*parts)}
    here = sum(
        tensor.numel() * tensor.element_size() for tensor in all_tensors(*parts) if tensor.device.type == where.type
    )
    free, whole = free_vram(where), sum(weights.values())
    if where.type != "cpu" and free + here < whole + _FOR_INFERENCE:
        return f"{DECIDES}: with {format_size(free)} free some layers stay, and the others come for their call"
    kept = f"{DECIDES}: with {format_size(free)} free it keeps all {format_size(whole)} of the model"
    return f"{kept}, {BREAKS}" if fetched else kept


def _largest_block(unet: Any) -> int:
    """What is in none of the blocks, such as the last convolution, and the largest block beside it."""
    groups = [getattr(unet, name) for name in _BLOCKS if getattr(unet, name, None) is not None]
    blocks = [one for group in groups for one in (group if isinstance(group, nn.ModuleList) else [group])]
    sizes = [weight_bytes(block) for block in blocks]
    return weight_bytes(unet) - sum(sizes) + max(sizes)


def _two_layers(component: nn.Module) -> int:
    """The layer that computes and the next, which may come meanwhile, in a type no narrower than float32."""
    sizes = (sum(tensor.numel() for tensor in all_tensors(one)) for one in _layers(component))
    return 2 * 4 * max(sizes, default=0)


def _layers(component: nn.Module) -> Iterator[nn.Module]:
    return (one for one in component.modules() if next(one.children(), None) is None)
