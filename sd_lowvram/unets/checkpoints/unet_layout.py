"""Numbers of layers of UNets like SD1.x's and SD2.x's: from the configuration, or from the names in a single file.

In a single file only the numbers of ``input_blocks`` and ``output_blocks`` show them: every layer and every sampler on
the way down has one, every layer on the way up has one. ComfyUI counts them in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...checkpoints.architectures import layers_per_block
from ...checkpoints.inspection import OwnUNet
from ...checkpoints.safetensors_header import Header
from ...errors import CheckpointError

UNET = "model.diffusion_model."
_BY_BLOCK = (
    *("attention_head_dim", "num_attention_heads", "cross_attention_dim"),
    *("transformer_layers_per_block", "only_cross_attention"),
)
"""Settings that a configuration may give block by block."""
KEPT = "_kept_layers"
"""The field of a configuration that notes which layers of the whole UNet these are, see ``unets.cuts``. diffusers
carries one that begins with an underscore from file to file, and passes it over otherwise."""
NOTED = "sd_lowvram.kept_layers"
"""The same in the metadata of a single file, as JSON."""


@dataclass(frozen=True)
class CutLayout:
    """Remaining layers of a cut UNet.

    Attributes:
        layers: number of layers of each down block, from the outside in; the opposite up block has one more.
        mid: True if there is a middle block.
    """

    layers: tuple[int, ...]
    mid: bool = True


def layout_of(config: Mapping[str, Any]) -> CutLayout:
    """Layout of a configuration's UNet."""
    return CutLayout(tuple(layers_per_block(config)), config.get("mid_block_type", "mid") is not None)


def cut_configuration(config: Mapping[str, Any], layout: CutLayout) -> dict[str, Any]:
    """The configuration of what is left of ``config``'s UNet; of its blocks the outermost stay."""
    blocks, gone = len(layout.layers), len(config["down_block_types"]) - len(layout.layers)
    changed: dict[str, Any] = {
        "down_block_types": [*config["down_block_types"][:blocks]],
        "up_block_types": [*config["up_block_types"][gone:]],
        "block_out_channels": [*config["block_out_channels"][:blocks]],
        "layers_per_block": layout.layers[0] if len({*layout.layers}) == 1 else [*layout.layers],
    }
    for name in _BY_BLOCK:
        if isinstance(config.get(name), (list, tuple)):
            changed[name] = [*config[name][:blocks]]
    if not layout.mid:
        changed["mid_block_type"] = None
    return {**config, **changed}


_NUMBERED = re.compile(r"(input|output)_blocks\.(\d{1,4})\.0\.(op|in_layers)\.")


def layout_of_names(names: Iterable[str]) -> CutLayout | None:
    """Layout of the UNet in a single file, from the ``names`` of its weights from ``input_blocks`` on.

    None if no UNet has such blocks: numbers are missing, or the two sides do not match.
    """
    kinds: dict[str, dict[int, str]] = {"input": {}, "output": {}}
    mid = False
    for name in names:
        mid = mid or name.startswith("middle_block.")
        if match := _NUMBERED.match(name):
            kinds[match[1]][int(match[2])] = match[3]
    down, up = kinds["input"], kinds["output"]
    layers = tuple(map(len, _runs([down.get(number, "") for number in range(1, len(down) + 1)])))
    whole = {*down} == {*range(1, len(down) + 1)} and {*up} == {*range(len(up))}
    paired = len(up) == sum(layers) + len(layers) and {*up.values()} == {"in_layers"}
    return CutLayout(layers, mid) if whole and paired and all(layers) else None


def _runs(kinds: list[str]) -> list[list[str]]:
    """The layers of each block, which samplers part."""
    runs, rest = [], [*kinds]
    while True:
        runs.append([*takewhile("in_layers".__eq__, rest)])
        if len(runs[-1]) == len(rest):
            return runs
        rest = rest[len(runs[-1]) + 1 :]


def cut_unet(name: str, whole: Mapping[str, Any], header: Header, path: Path) -> OwnUNet | None:
    """The UNet of a single file from which layers were cut, None where it is the architecture's, or none at all.

    Raises:
        CheckpointError: SDXL's with layers cut, or a note of which they are that cannot be understood.
    """
    layout = layout_of_names(key.removeprefix(UNET) for key in header.tensors if key.startswith(UNET))
    own = layout_of(whole)
    if layout is None or len(layout.layers) > len(own.layers) or layout == own:
        return None
    if name == "sdxl":
        raise CheckpointError(
            f"{path} is SDXL with layers cut out of its UNet: such a model loads from a diffusers folder"
        )
    return OwnUNet(cut_configuration(whole, layout) | {KEPT: _note(header, path)})


def _note(header: Header, path: Path) -> Any:
    """Record of the removed layers in the file's metadata; empty if another program removed them."""
    text = header.metadata.get(NOTED)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its {NOTED} cannot be understood ({error})") from None
