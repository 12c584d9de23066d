"""Remaining layers of a cut UNet, and their record in its configuration: LoRAs count the whole UNet's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..checkpoints.architectures import layers_per_block
from ..errors import CheckpointError
from .checkpoints.unet_layout import KEPT


@dataclass(frozen=True)
class Cut:
    """Remaining layers of a UNet.

    Attributes:
        down: for each remaining down block, from the outside in, its remaining layers.
        up: the same for each remaining up block, from the inside out.
        mid: True if the middle block remains.
    """

    down: tuple[tuple[int, ...], ...]
    up: tuple[tuple[int, ...], ...]
    mid: bool


def whole(config: Mapping[str, Any]) -> Cut:
    """Nothing is cut."""
    layers = layers_per_block(config)
    down = tuple(tuple(range(number)) for number in layers)
    up = tuple(tuple(range(number + 1)) for number in reversed(layers))
    return Cut(down, up, config.get("mid_block_type", "mid") is not None)


def recorded_layers(config: Mapping[str, Any]) -> tuple[list[int], Cut]:
    """The layers of each down block of the whole UNet, and what of it is here; all of it where nothing is recorded.

    Raises:
        CheckpointError: the record does not fit the configuration.
    """
    note = config.get(KEPT)
    if note is None:
        return layers_per_block(config), whole(config)
    try:
        down, up = (tuple(tuple(map(int, layers)) for layers in note[side]) for side in ("down", "up"))
        layers, cut = [int(number) for number in note["layers"]], Cut(down, up, bool(note["mid"]))
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"the UNet's configuration is damaged: {KEPT} is {note!r}") from None
    here = whole(config)
    same = [[len(block) for block in side] for side in (cut.down, cut.up)]
    if same != [[len(block) for block in side] for side in (here.down, here.up)] or len(layers) < len(down):
        raise CheckpointError(f"the UNet's configuration is damaged: {KEPT} lists other layers than it has")
    return layers, cut


def note_of(layers: Sequence[int], cut: Cut) -> dict[str, Any]:
    """The record that :func:`recorded_layers` reads."""
    return {KEPT: {"layers": [*layers], **asdict(cut)}}


def cut_again(config: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """The note of what ``cut`` leaves of a UNet of ``config``, which may be cut itself."""
    layers, before = recorded_layers(config)
    gone = len(before.up) - len(cut.up)
    down = _index_layers(before.down, cut.down)
    return note_of(layers, Cut(down, _index_layers(before.up[gone:], cut.up), before.mid and cut.mid))


def put_together(compressed: Mapping[str, Any], original: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """The note of a UNet with the outermost ``blocks`` of one and the inner ones of the other.

    Both were cut from UNets of the same layers, or nothing is noted: then the layers are counted as they are.
    """
    (layers, outer), (original_layers, inner) = recorded_layers(compressed), recorded_layers(original)
    if layers[:blocks] != original_layers[:blocks] or len(layers) != len(original_layers):
        return {KEPT: None}
    deep = len(inner.up) - blocks
    cut = Cut((*outer.down[:blocks], *inner.down[blocks:]), (*inner.up[:deep], *outer.up[-blocks:]), inner.mid)
    return note_of(original_layers, cut)


def _index_layers(before: Sequence[Sequence[int]], remaining: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(block[layer] for layer in layers) for block, layers in zip(before, remaining, strict=False))
