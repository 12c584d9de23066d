"""Conversion of a LoRA of a whole UNet to the layer numbers of a UNet that was cut from it.

A cut renumbers the remaining layers: of SD1.5's up blocks, base has the first and the last layer, and the last is then
the second. An unconverted LoRA would apply its weights for the middle layer to the last one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import BadInputError, CheckpointError
from .cuts import Cut, recorded_layers
from .layers import check_unet
from .prune import narrow

Layer = tuple[str, int, int]
"""Side ("down", "up" or "mid"), block, and layer there."""
_SAMPLER, _BEYOND = 1000, -1
"""Placeholders for the number of a sampler's layer, and of a layer outside of all blocks."""

_DIFFUSERS = re.compile(r"(down|up)_blocks([._])(\d+)([._])(resnets|attentions|downsamplers|upsamplers)([._])(\d+)")
_COMPVIS = re.compile(r"(input|output)_blocks([._])(\d+)")
_MIDDLE = re.compile(r"(mid|middle)_block[._]")
_TENSORS = (
    *(
        "lora_up.",
        "lora_down.",
        "lora_mid.",
        "lora_A.",
        "lora_B.",
        "lora.up.",
        "lora.down.",
        "_lora.up.",
        "_lora.down.",
    ),
    *("hada_", "lokr_", "dora_scale", "lora_magnitude_vector", "oft_"),
)
"""Names of the tensors in LoRAs."""
_TAKES = re.compile(r"(lora_down|lora_A|lora\.down)\.(\w+\.)?weight$")
"""Names of the tensors that receive a layer's input."""
_INNERMOST = re.compile(
    r"up_blocks[._]0[._]resnets[._]0[._](conv1|conv_shortcut)\b|output_blocks[._]0[._]0[._](in_layers|skip_connection)"
)
_TEXT = ("text_encoder", "lora_te", "te1.", "te2.")


def lora_for(unet: Any, lora: Mapping[str, Tensor] | str | Path) -> dict[str, Tensor]:
    """Convert a LoRA for a UNet that `unet prune`, `combine` or `distil` made::

        pipe.load_lora_weights(lora_for(pipe.unet, "style.safetensors"))

    Tensors for removed layers are left out, and one warning names them. Everything else stays as it is, text encoders
    too; for a UNet without a cut the LoRA is unchanged. Fidelity: ``bitwise`` to cutting the model after the LoRA was
    fused into it.

    Args:
        unet: a UNet2DConditionModel; it may be on the meta device.
        lora: its tensors by name, or a .safetensors file: names of diffusers, PEFT or kohya, layers counted as in
            diffusers or as in CompVis' checkpoints (``input_blocks``).

    Raises:
        CheckpointError: the file cannot be read, or the UNet's record of removed layers is damaged.
        BadInputError: not a LoRA; a LoRA of which nothing remains; a LoRA with layers that the UNet lacks, without a
            record of removed layers.
    """
    check_unet(unet)
    tensors = _read(lora) if isinstance(lora, (str, Path)) else dict(lora)
    if not any(mark in name for name in tensors for mark in _TENSORS):
        raise BadInputError(
            f"{_describe(lora)} is not a LoRA: none of its {len(tensors)} tensors is called as theirs are"
        )
    layers, cut = recorded_layers(unet.config)
    new_places, numbers = _places(layers, cut), _Numbers(layers, cut)
    renamed: dict[str, Tensor] = {}
    gone: set[Layer] = set()
    for name, tensor in tensors.items():
        layer = _layer_of(name, numbers)
        if layer is None:
            renamed[name] = tensor
        elif layer not in new_places:
            raise BadInputError(_beyond(lora, layer))
        elif (place := new_places[layer]) is None:
            gone.add(layer)
        else:
            new = _rename(name, place, numbers)
            renamed[new] = _narrow(new, tensor, unet)
    lost = ", ".join(map(_layer_name, sorted(gone)))
    if gone and all(name.startswith(_TEXT) for name in renamed):
        raise BadInputError(
            f"nothing of {_describe(lora)} is left for this UNet: it changes layers that were cut, {lost}"
        )
    if gone:
        warnings.warn(f"layers that were cut are left out of {_describe(lora)}: {lost}", stacklevel=2)
    return renamed


def _places(layers: Sequence[int], cut: Cut) -> dict[Layer, Layer | None]:
    """Each layer of the whole UNet and its place in the one that was cut, None where it is gone."""
    gone = len(layers) - len(cut.down)
    blocks = {("down", number): (number, here) for number, here in enumerate(cut.down)}
    blocks |= {("up", gone + number): (number, here) for number, here in enumerate(cut.up)}
    places: dict[Layer, Layer | None] = {("mid", 0, 0): ("mid", 0, 0) if cut.mid else None}
    for side, counts in (("down", layers), ("up", [number + 1 for number in reversed(layers)])):
        for block, count in enumerate(counts):
            new, here = blocks.get((side, block), (0, ()))
            for layer in range(count):
                places[side, block, layer] = (side, new, here.index(layer)) if layer in here else None
            if block < len(layers) - 1:
                last = side == "down" and new == len(cut.down) - 1
                places[side, block, _SAMPLER] = (side, new, _SAMPLER) if here and not last else None
    return places


class _Numbers:
    """CompVis' numbers of layers: in the whole UNet, and in the one that was cut."""

    def __init__(self, layers: Sequence[int], cut: Cut) -> None:
        self.layers = dict(_number_layers(layers))
        self.here = {layer: number for number, layer in _number_layers([len(layers) for layers in cut.down])}


def _number_layers(layers: Sequence[int]) -> Iterator[tuple[tuple[str, int], Layer]]:
    """("input", 1), ("down", 0, 0) and so on; an up block's sampler is in the number of its last layer."""
    number = 1  # behind the first convolution
    for block, count in enumerate(layers):
        kinds = [*range(count), *([_SAMPLER] if block < len(layers) - 1 else [])]
        for layer in kinds:
            yield ("input", number), ("down", block, layer)
            number += 1
    number = 0
    for block, count in enumerate(reversed(layers)):
        for layer in range(count + 1):
            yield ("output", number), ("up", block, layer)
            number += 1


def _layer_of(name: str, numbers: _Numbers) -> Layer | None:
    """The layer of the whole UNet that a tensor is for; None: no layer's."""
    if _MIDDLE.search(name):
        return "mid", 0, 0
    if match := _DIFFUSERS.search(name):
        return match[1], int(match[3]), _SAMPLER if match[5].endswith("samplers") else int(match[7])
    if (match := _COMPVIS.search(name)) and (match[1], int(match[3])) != ("input", 0):
        number = match[1], int(match[3])
        return numbers.layers.get(number, ("down" if number[0] == "input" else "up", _BEYOND, number[1]))
    return None


def _rename(name: str, place: Layer, numbers: _Numbers) -> str:
    """The name for the layer at ``place`` of the UNet that was cut."""
    side, block, layer = place
    if side == "mid":
        return name
    if match := _DIFFUSERS.search(name):
        number = match[7] if layer == _SAMPLER else layer
        new = f"{side}_blocks{match[2]}{block}{match[4]}{match[5]}{match[6]}{number}"
    else:
        match = _COMPVIS.search(name)
        assert match is not None
        new = f"{match[1]}_blocks{match[2]}{numbers.here[place][1]}"
    return name[: match.start()] + new + name[match.end() :]


def _narrow(name: str, tensor: Tensor, unet: Any) -> Tensor:
    """Cut the tensor to the innermost up layer's input, if a removed block before it had more channels."""
    if not (_INNERMOST.search(name) and _TAKES.search(name) and tensor.ndim > 1):
        return tensor
    wanted = unet.up_blocks[0].resnets[0].conv1.in_channels
    return narrow(tensor, 1, wanted, unet.config["block_out_channels"][-1])


def _read(file: str | Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the LoRA {file} cannot be read: {error}") from None


def _beyond(lora: Any, layer: Layer) -> str:
    side, block, number = layer
    numbered = f"{'input' if side == 'down' else 'output'} block number {number} of a checkpoint"
    which = numbered if block == _BEYOND else _layer_name(layer)
    return (
        f"{_describe(lora)} changes {which}, which this UNet does not have, and no note says that it was cut: make the "
        "cut again with `unet prune`, which notes it, or take a LoRA of this very model"
    )


def _layer_name(layer: Layer) -> str:
    """Name of a layer as in `unet prune`."""
    side, block, number = layer
    if side == "mid":
        return side
    return f"{'dn' if side == 'down' else side}{block}.{'sample' if number == _SAMPLER else number}"


def _describe(lora: Any) -> str:
    return Path(lora).name if isinstance(lora, (str, Path)) else "the LoRA"
