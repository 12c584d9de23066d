"""Blocks: the pieces in which weights are copied. A block is a few consecutive layers, one layer, or some rows of one.

Small consecutive layers share a block, because every copy has a fixed cost. Very small ones (norms) stay on the device:
they are used in several places, and all of them together have fewer bytes than one convolution.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from .layers import Layer, inner_layers, place_bytes
from .schedule import WeightGroup, align

Granularity = Literal["layer", "blocks", "halves"]

_JOINED = 8
"""Layers are joined up to this part of the largest one, so that joining makes no place on the device larger."""
_STAYING = 512
"""Layers below this part of the largest one stay: norms are, linear layers and convolutions are not."""


@dataclass(frozen=True, eq=False)
class Block:
    """Layers whose weights are copied and freed together.

    Attributes:
        name: for people.
        layers: in the order in which a run calls them.
        rows: for a part of a single layer, its first and last output row. None: the whole layer.
    """

    name: str
    layers: tuple[Layer, ...]
    rows: tuple[int, int] | None = None

    @property
    def component(self) -> str:
        """The name of the model to which it belongs."""
        return self.layers[0].component

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Weights of the block's layers."""
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the block on the device."""
        if self.rows is None:
            return sum(layer.bytes for layer in self.layers)
        return sum(_row_bytes(tensor, self.rows[1] - self.rows[0]) for tensor in self.tensors)

    def part(self, data: Tensor) -> Tensor:
        """Return the rows of a tensor's contents that belong to this block."""
        return data if self.rows is None else data[self.rows[0] : self.rows[1]]


@dataclass(frozen=True, eq=False)
class Blocks:
    """All layers of one or more models.

    Attributes:
        staying: layers that are on the device while any of the models runs.
        streamed: blocks in the order in which a run uses them. The schedule decides which of them stay as well.
        lookups: tables that never leave host memory.
    """

    staying: tuple[Layer, ...]
    streamed: tuple[Block, ...]
    lookups: tuple[Layer, ...] = ()

    @functools.cached_property
    def staying_bytes(self) -> int:
        """Bytes of the layers that stay on the device."""
        return sum({id(t): place_bytes(t) for layer in self.staying for t in layer.tensors}.values())

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all blocks on the device, without tables."""
        return self.staying_bytes + sum(block.bytes for block in self.streamed)

    def units(self) -> list[WeightGroup]:
        """The streamed blocks for a schedule to which times do not matter."""
        return [WeightGroup(block.name, block.bytes, 0.0) for block in self.streamed]


def blocks_of(
    layers: Sequence[Layer],
    granularity: Granularity = "blocks",
    part_bytes: int | None = None,
    together_bytes: int = 0,
    whole_bytes: int = 0,
) -> Blocks:
    """Group layers into blocks, or split large ones.

    Args:
        layers: in the order in which a run calls them.
        granularity: "halves": two blocks of about the same bytes. Otherwise: small neighbours share a block.
        part_bytes: larger layers are split into parts of output rows of at most this size, except layers that other
            code runs or whose weights other code reads. None: every layer is one piece.
        together_bytes: a residual block or transformer of at most this size is one block.
        whole_bytes: the same limit for consecutive modules of equal structure, if it is larger. Their layers alternate,
            so separate blocks would evict each other.

    Returns:
        Layers that stay, streamed blocks, and tables.
    """
    lookups = tuple(layer for layer in layers if layer.lookup)
    layers = [layer for layer in layers if not layer.lookup]
    if part_bytes is not None:
        layers = [each for layer in layers for each in _cut_open(layer, part_bytes)]
    largest = max((layer.bytes for layer in layers), default=0)
    tied = _tied_ids(layers)
    staying: list[Layer] = []
    moving: list[Layer] = []
    for layer in layers:
        (staying if _stays(layer, largest // _STAYING, tied) else moving).append(layer)
    if granularity == "halves":
        streamed = _halves(moving)
    else:
        groups = _join_small(moving, largest // _JOINED, _modules(moving, together_bytes, whole_bytes))
        streamed = [block for group in groups for block in _split_group(group, part_bytes)]
    return Blocks(tuple(staying), tuple(streamed), lookups)


def _stays(layer: Layer, small: int, tied: Set[int]) -> bool:
    return layer.bytes <= small or layer.around or any(id(tensor) in tied for tensor in layer.tensors)


def _tied_ids(layers: Iterable[Layer]) -> set[int]:
    """Tensors that several layers hold: they come once and stay. Of a part of a quantised weight each has its own."""
    held = Counter(id(tensor) for layer in layers for tensor in layer.tensors)
    parts = {id(part) for layer in layers for link in layer.links for part in link.parts}
    return {tensor for tensor, count in held.items() if count > 1} - parts


def _modules(layers: Sequence[Layer], most: int, most_whole: int) -> dict[str, str]:
    """Map the name of each layer to the largest enclosing module of at most ``most`` bytes, or of at most
    ``most_whole`` if the module is one of several of equal structure.

    UNet blocks, which are sequences of residual blocks and transformers, do not count.
    """
    if most == 0:
        return {}
    sizes: Counter[str] = Counter()
    for layer in layers:
        sizes.update(dict.fromkeys(_enclosing_paths(layer.name), layer.bytes))
    blocks = {path.removesuffix(".resnets") for path in sizes if path.endswith(".resnets")}
    alike = _repeated_modules(layers)
    small = {path for path, size in sizes.items() if size <= (max(most, most_whole) if path in alike else most)}
    allowed = {path for path in small - blocks if "." in path}
    inside = {layer.name: [path for path in _enclosing_paths(layer.name) if path in allowed] for layer in layers}
    return {name: paths[0] for name, paths in inside.items() if paths}


def _repeated_modules(layers: Iterable[Layer]) -> set[str]:
    """Modules that are numbered in a list (``layers.3``), have several layers, and contain no other such module."""
    counts = Counter(path for layer in layers for path in _enclosing_paths(layer.name))
    repeated = {path for path, count in counts.items() if count > 1 and path.rpartition(".")[2].isdigit()}
    return repeated - {outer for path in repeated for outer in _enclosing_paths(path)}


def _enclosing_paths(name: str) -> list[str]:
    """The paths above a layer, the component's first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _join_small(layers: Iterable[Layer], most: int, modules: dict[str, str]) -> Iterator[tuple[Layer, ...]]:
    """Neighbours within one of ``modules``, and other small ones up to ``most`` bytes."""
    group: list[Layer] = []
    for layer in layers:
        first = group[0] if group else layer
        together = modules.get(layer.name) == modules.get(first.name)
        full = layer.name not in modules and sum(member.bytes for member in group) + layer.bytes > most
        if group and (full or not together or first.component != layer.component):
            yield tuple(group)
            group = []
        group.append(layer)
    if group:
        yield tuple(group)


def _halves(layers: Sequence[Layer]) -> list[Block]:
    """The cut that leaves the smaller of the larger halves."""
    sizes = [layer.bytes for layer in layers]
    cut = min(range(len(layers) + 1), key=lambda at: max(sum(sizes[:at]), sum(sizes[at:])))
    halves = [("first half", layers[:cut]), ("second half", layers[cut:])]
    return [Block(name, tuple(half)) for name, half in halves if half]


def _split_group(group: tuple[Layer, ...], part_bytes: int | None) -> Iterator[Block]:
    first = group[0]
    if part_bytes is None or len(group) > 1 or first.bytes <= part_bytes or first.links or not can_be_cut(first.module):
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        yield Block(first.name + more, group)
        return
    outputs = len(first.tensors[0])
    rows = _rows_within(first, part_bytes)
    for start in range(0, outputs, rows):
        stop = min(start + rows, outputs)
        yield Block(f"{first.name}[{start}:{stop}]", group, (start, stop))


def _rows_within(layer: Layer, part_bytes: int) -> int:
    """Outputs of ``layer`` whose weights stay within ``part_bytes``, the same for all parts but the last."""
    outputs = len(layer.tensors[0])
    most = outputs
    while most > 1 and sum(_row_bytes(tensor, most) for tensor in layer.tensors) > part_bytes:
        most = most * 7 // 8
    parts = -(-outputs // most)
    even = -(-outputs // parts)
    return even if most < 16 else min(most, -(-even // 8) * 8)  # matrix kernels like multiples of 8


def _row_bytes(tensor: Tensor, rows: int) -> int:
    return align(tensor.numel() // len(tensor) * rows * tensor.element_size())


def _cut_open(layer: Layer, part_bytes: int) -> list[Layer]:
    """``layer``, or what it is made of where it is too large and was wrapped."""
    if layer.bytes <= part_bytes:
        return [layer]
    if layer.whole and hasattr(layer.module, "base_layer") and not any(getattr(layer.module, "use_dora", {}).values()):
        return [each for inner in inner_layers(layer) for each in _cut_open(inner, part_bytes)]
    return [layer]


def can_be_cut(module: Any) -> bool:
    """Return True if each output of ``module`` depends on one row of its weight.

    That holds for torch's own forward, and for the padded convolution of an autoencoder of frames."""
    convolves = isinstance(module, (nn.Conv2d, nn.Conv3d))
    if (convolves and module.groups != 1) or not (convolves or isinstance(module, nn.Linear)):
        return False
    pads = isinstance(module, nn.Conv3d) and type(module).__name__.endswith("CausalConv3d")
    return pads or type(module).forward.__module__.startswith("torch.nn.")
