"""Puts experts and regional attention into the shallow blocks of a UNet, as A-SDM (2023) does where layers were cut.

Its shallow blocks (dn0, and the up block across) hold few of the parameters and take much of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInputError
from .cond_conv import CondConv2d

_FIRST_SHARE = 0.9
"""Initial share of the first expert. The rest then differ from each other, and change the result little."""

Relatives = Callable[[str], Iterable[str]]
"""Function from the path of a layer in a cut UNet to the paths, in the whole UNet, of the layers removed next to it."""


@dataclass(frozen=True)
class BlockChanges:
    """Changes to some blocks of a UNet.

    Attributes:
        experts: number of experts of each 3x3 convolution; 1: unchanged.
        regions: side of a region of self-attention, in tokens; None: unchanged.
        blocks: names of blocks such as "dn0", "up3"; empty: the outermost one on each side.
        seed: seed of the random weights of experts that inherit nothing.
    """

    experts: int = 1
    regions: int | None = None
    blocks: tuple[str, ...] = ()
    seed: int = 0


def check_unchanged(unet: Any) -> None:
    """Raise BadInputError where ``unet`` has changed blocks already."""
    from .asdm_unet import is_changed

    if is_changed(unet.config):
        raise BadInputError(
            f"this UNet has experts={unet.config['experts']} and regions={unet.config['regions']} in "
            f"{', '.join(unet.config['changed_blocks'])} already: give the model that it was made of"
        )


def change_blocks(unet: Any, changes: BlockChanges, whole: Mapping[str, Tensor], relatives: Relatives) -> Any:
    """Return a UNet like ``unet`` with ``changes``; ``unet`` itself if nothing changes.

    First experts are the layers of ``unet``; the next ones are removed neighbours of equal shape; the rest is random.
    Routers start with equal shares for all pictures, the gates of regional attention with zero.

    Args:
        whole: weights of the UNet before the cut, by name.
        relatives: function from a layer of ``unet`` to the layers in ``whole`` that it also inherits.

    Raises:
        BadInputError: experts below 1 or above 64, a side below 1, a missing block, or nothing to change.
    """
    from .asdm_unet import ASDMUNet2DConditionModel, check_changes, is_changed

    check_changes(changes.experts, changes.regions)
    ours = {"experts": changes.experts, "regions": changes.regions}
    if not is_changed(ours):
        return unet
    blocks = changes.blocks or ("dn0", f"up{len(unet.up_blocks) - 1}")
    config = {name: value for name, value in unet.config.items() if not name.startswith("_")}
    with torch.device("meta"):
        result: Any = ASDMUNet2DConditionModel.from_config({**config, **ours, "changed_blocks": [*blocks]})
    generator = torch.Generator().manual_seed(changes.seed)
    weights = unet.state_dict()
    for path, module in result.named_modules():
        if isinstance(module, CondConv2d):
            inherited = [_layer(whole, other) for other in relatives(path)]
            weights |= _experts(path, module, _layer(weights, path), inherited, generator)
    missing = {name: empty for name, empty in result.state_dict().items() if name not in weights}
    if changes.regions is not None and not missing:
        raise BadInputError(
            f"{' and '.join(blocks)} have no self-attention that regions could divide: name other blocks"
        )
    device = next(iter(weights.values())).device
    weights |= {name: torch.zeros_like(empty, device=device) for name, empty in missing.items()}
    result.load_state_dict(weights, assign=True)
    return nn.Module.to(result, unet.dtype).eval().requires_grad_(False)


_Layer = tuple[Tensor, Tensor]


def _layer(weights: Mapping[str, Tensor], path: str) -> _Layer:
    return weights[f"{path}.weight"], weights[f"{path}.bias"]


def _experts(
    path: str, module: CondConv2d, pair: _Layer, inherited: list[_Layer], generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights of a convolution with several experts, by name."""
    equal_layers = [layer for layer in inherited if layer[0].shape == pair[0].shape][: module.experts - 1]
    drawn = [_random_layer(pair, generator) for _ in range(module.experts - 1 - len(equal_layers))]
    kernels, biases = zip(pair, *equal_layers, *drawn, strict=True)
    router = torch.zeros(module.experts)
    router[0] = torch.tensor(_FIRST_SHARE / (1 - _FIRST_SHARE) * (module.experts - 1)).log()
    return {
        f"{path}.weight": torch.cat(kernels),
        f"{path}.bias": torch.cat(biases),
        f"{path}.router_weight": pair[0].new_zeros(module.experts, module.in_channels),
        f"{path}.router_bias": router.to(pair[0]),
    }


def _random_layer(pair: _Layer, generator: torch.Generator) -> _Layer:
    """A random layer with the shapes of ``pair``, with torch's default initialisation."""
    bound: float = pair[0][0].numel() ** -0.5
    kernel, bias = (bound * (2 * torch.rand(tensor.shape, generator=generator) - 1) for tensor in pair)
    return kernel.to(pair[0]), bias.to(pair[1])
