"""Removal of layers from a UNet; the other layers keep their weights, and the result is a plain diffusers model.

The cuts base, small and tiny are those of BK-SDM (Kim et al. 2023), from which A-SDM (2023) starts. Every layer of a
down block has a skip connection to a layer of the opposite up block: the two are removed together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import BadInputError
from .changes import BlockChanges, Relatives, change_blocks, check_unchanged
from .checkpoints.unet_layout import KEPT, CutLayout, cut_configuration
from .cuts import Cut, cut_again, whole
from .layers import check_unet

KINDS = ("base", "small", "tiny")
_ALWAYS = (
    *("conv_in", "time_embedding", "add_embedding", "class_embedding", "encoder_hid_proj"),
    *("conv_norm_out", "conv_out"),
)
"""Parts that no cut removes."""


def cut_of_kind(config: Mapping[str, Any], kind: str) -> Cut:
    """Return the cut of a name.

    "base" removes one layer of each block, "small" also the middle block, "tiny" also the innermost blocks.

    Args:
        config: configuration of the UNet.
        kind: the name.

    Raises:
        BadInputError: the name is unknown, or the UNet has no second layers to cut.
    """
    if kind not in KINDS:
        raise BadInputError(f"the cut {kind!r} is unknown: choose one of {', '.join(KINDS)}")
    full = whole(config)
    if any(len(layers) < 2 for layers in full.down):
        layers = " and ".join(map(str, sorted({len(layers) for layers in full.down})))
        why = "it is cut already" if config.get(KEPT) else "it was made or cut so"
        left = ". --drop mid cuts its middle block" if full.mid else ""
        raise BadInputError(
            f"{kind!r} takes the second layer of every down block, and this UNet has {layers} in a block: {why}{left}"
        )
    down = tuple((0, *layers[2:]) for layers in full.down)
    up = tuple((0, *layers[2:]) for layers in full.up)
    if kind == "tiny":
        down, up = down[:-1], up[1:]
    return Cut(down, up, full.mid and kind == "base")


_NAME = re.compile(r"(dn|up)(\d+)(?:\.(\d+))?|mid")


def cut_by_names(config: Mapping[str, Any], keep: Collection[str] = (), drop: Collection[str] = ()) -> Cut:
    """Return the cut that drops the named parts, or keeps only the named layers.

    Args:
        config: configuration of the UNet.
        keep: layers to keep: "dn0.1", "up3.1", "mid", or a block, "dn3".
        drop: parts to drop.

    Raises:
        BadInputError: a name is unknown, both lists are given, the cut removes nothing, or no map finds its way through
            it.
    """
    if bool(keep) == bool(drop):
        raise BadInputError("name either layers to keep (--keep) or parts to drop (--drop)")
    full = whole(config)
    named = {part for name in keep or drop for part in _parts(full, name)}

    def is_left(part: str) -> bool:
        return (part in named) == bool(keep)

    def left_of(side: str, blocks: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
        return [tuple(layer for layer in layers if is_left(f"{side}{n}.{layer}")) for n, layers in enumerate(blocks)]

    down, up = left_of("dn", full.down), left_of("up", full.up)
    while len(down) > 1 and not down[-1] and not up[0]:
        del down[-1], up[0]
    cut = Cut(tuple(down), tuple(up), full.mid and is_left("mid"))
    _check_path(full, cut)
    if cut == full:
        raise BadInputError("--keep names all layers that this UNet has: nothing would be cut")
    return cut


def _parts(full: Cut, name: str) -> list[str]:
    """Layers of a name."""
    match = _NAME.fullmatch(name.strip())
    if match is None:
        raise BadInputError(
            f"{name!r} names no layer: dn0.1 is the second layer of the outermost down block, mid the middle"
        )
    if match[1] is None:
        return ["mid"]
    blocks = full.down if match[1] == "dn" else full.up
    number = int(match[2])
    layers = blocks[number] if number < len(blocks) else ()
    chosen = layers if match[3] is None else [layer for layer in layers if layer == int(match[3])]
    if not chosen:
        last = f"dn{len(blocks) - 1}" if match[1] == "dn" else f"up{len(blocks) - 1}"
        raise BadInputError(
            f"this UNet has no {name}: its blocks go up to {last}" + (f", with {len(layers)} layers" if layers else "")
        )
    return [f"{match[1]}{number}.{layer}" for layer in chosen]


def _check_path(full: Cut, cut: Cut) -> None:
    """Refuse what would leave maps without a taker, or layers with other channels than they were made for."""
    blocks, gone = len(cut.down), len(full.down) - len(cut.down)
    for number, own in enumerate(cut.down):
        across = blocks - 1 - number
        names = f"dn{number}", f"up{gone + across}"
        above = cut.up[across]
        if len(above) != len(own) + 1:
            raise BadInputError(
                f"{names[0]} would keep {len(own)} layers and {names[1]} {len(above)}: each layer of {names[0]} gives "
                f"{names[1]} a skip connection, and {names[1]} needs one layer more"
            )
        if not own or own[0] != 0:
            raise BadInputError(f"{names[0]}.0 cannot be cut: it alone takes the map of the block before it")
        if {0, full.up[gone + across][-1]} - {*above}:
            raise BadInputError(
                f"the first and the last layer of {names[1]} cannot be cut: only they take the maps of the "
                "neighbouring blocks"
            )


def pruned_config(config: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """The configuration of what ``cut`` leaves."""
    return {**cut_configuration(config, CutLayout(tuple(map(len, cut.down)), cut.mid)), **cut_again(config, cut)}


_OF_THE_MIDDLE = ("block_out_channels", "attention_head_dim", "num_attention_heads", "transformer_layers_per_block")


def _check_middle(config: Mapping[str, Any], cut: Cut) -> None:
    """Refuse a middle block that would follow a block unlike the one that it was made for."""
    blocks = len(cut.down)
    for name in _OF_THE_MIDDLE if cut.mid else ():
        value = config.get(name)
        if isinstance(value, (list, tuple)) and value[blocks - 1] != value[-1]:
            raise BadInputError(
                f"the middle block was made for the innermost blocks, which are cut: {name} is {value[-1]} there and "
                f"{value[blocks - 1]} in what is left; drop mid, too"
            )


def prune_unet(unet: Any, cut: Cut, changes: BlockChanges | None = None) -> Any:
    """A UNet of what ``cut`` leaves of ``unet``, with copies of its weights; on the meta device without any.

    Args:
        changes: what is put into blocks of what is left, named as they are then.

    Raises:
        BadInputError: not a UNet that is known; one with changed blocks; innermost blocks are cut that are narrower
            than what is left, or without the middle block that was made for them; or changes that cannot be made.
    """
    check_unet(unet)
    check_unchanged(unet)
    _check_middle(unet.config, cut)
    widths, blocks = unet.config["block_out_channels"], len(cut.down)
    if blocks < len(widths) and widths[blocks - 1] > widths[blocks]:
        raise BadInputError(
            f"the block before the cut has {widths[blocks - 1]} channels and the one that is cut {widths[blocks]}: the "
            "up layer across has no weights for them"
        )
    left = assemble_unet(pruned_config(unet.config, cut), [(unet, origins(cut, len(widths)))])
    return change_blocks(left, changes or BlockChanges(), unet.state_dict(), relatives(cut, whole(unet.config)))


def origins(cut: Cut, blocks: int) -> dict[str, str]:
    """Path in the UNet that ``cut`` leaves -> path in the whole one, which has so many ``blocks``."""
    paths = {name: name for name in _ALWAYS}
    if cut.mid:
        paths["mid_block"] = "mid_block"
    gone = blocks - len(cut.down)
    sides = ("down_blocks", 0, "downsamplers", cut.down), ("up_blocks", gone, "upsamplers", cut.up)
    for side, first, samplers, all_kept in sides:
        for number, layers in enumerate(all_kept):
            new, old = f"{side}.{number}", f"{side}.{first + number}"
            paths[f"{new}.{samplers}"] = f"{old}.{samplers}"
            for place, layer in enumerate(layers):
                paths |= {f"{new}.{kind}.{place}": f"{old}.{kind}.{layer}" for kind in ("resnets", "attentions")}
    return paths


def relatives(cut: Cut, full: Cut) -> Relatives:
    """Function from a layer of a remaining residual block to the same layers of the blocks removed next to it."""
    gone = len(full.down) - len(cut.down)
    sides = {"down_blocks": (0, full.down, cut.down), "up_blocks": (gone, full.up, cut.up)}

    def find(path: str) -> list[str]:
        side, _, rest = path.partition(".")
        number, _, inside = rest.partition(".")
        if side not in sides or not inside.startswith("resnets."):
            return []
        first, before, left = sides[side]
        layers = [layer for layer in before[first + int(number)] if layer not in left[int(number)]]
        name = inside.split(".", 2)[2]
        return [f"{side}.{first + int(number)}.resnets.{layer}.{name}" for layer in layers]

    return find


def assemble_unet(config: Mapping[str, Any], parts: list[tuple[nn.Module, dict[str, str]]]) -> Any:
    """A UNet of ``config`` with copies of the weights of several: each a UNet, and its paths by those of the new."""
    from diffusers import UNet2DConditionModel

    from .asdm_unet import ASDMUNet2DConditionModel, is_changed

    first: Any = parts[0][0]
    # A name under "_use_default_values" would be reset to its default, whatever its value is now.
    asked = {name: value for name, value in config.items() if name == KEPT or not name.startswith("_")}
    with torch.device("meta"):
        model = (ASDMUNet2DConditionModel if is_changed(config) else UNet2DConditionModel).from_config(asked)
    weights: dict[str, torch.Tensor] = {}
    for unet, places in parts:
        state = unet.state_dict()
        for new, old in places.items():
            inside = (name for name in state if name.startswith(old + "."))
            weights |= {new + name.removeprefix(old): state[name].detach().clone() for name in inside}
    hidden = config["block_out_channels"][-1]
    wanted = {name: weight.shape for name, weight in model.state_dict().items()}
    model.load_state_dict(
        {name: _narrow_layer(name, weights[name], wanted[name], hidden) for name in wanted}, assign=True
    )
    return nn.Module.to(model, first.dtype).eval().requires_grad_(False)  # diffusers' own `to` warns of float32 parts


def _narrow_layer(name: str, weight: torch.Tensor, shape: torch.Size, hidden: int) -> torch.Tensor:
    """The weight of the innermost up layer for a map of ``hidden`` channels, where the block that was cut before it
    gave more."""
    if not name.startswith("up_blocks.0.resnets.0."):
        return weight
    for axis, new in enumerate(shape):
        weight = narrow(weight, axis, new, hidden)
    return weight


def narrow(weight: torch.Tensor, axis: int, channels: int, hidden: int) -> torch.Tensor:
    """``weight`` with so many ``channels`` along ``axis``: of a map with more than ``hidden`` the last of those go, the
    skip connection's behind them stay."""
    more = weight.shape[axis] - channels
    if more <= 0:
        return weight
    remaining = channels - hidden
    return torch.cat([weight.narrow(axis, 0, hidden), weight.narrow(axis, hidden + more, remaining)], axis)
