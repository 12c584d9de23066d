"""Compute times of the blocks of weights, from the times of the modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..devices.performance import Rates
from .blocks import Block
from .layers import Layer
from .schedule import WeightGroup
from .simulator import CopyQueue


@dataclass
class ModuleSpan:
    """The work of a module between the calls of other modules.

    Attributes:
        path: dotted name of the module, "" for work outside of all modules.
        flops: floating-point operations of matrix products, convolutions and attention; a multiply-add counts two.
        wide_flops: the part of ``flops`` in products and attention as wide as in today's transformers.
        moved_bytes: bytes that the operators read and write, each operator by itself.
        product_bytes: the part of ``moved_bytes`` of the operators that are counted in ``flops``.
        copied_bytes: bytes copied between device and host.
        operators: how many ran, views not counted: on a GPU, about the number of launches.
        packed_bytes: weights of convolutions and products, which a CPU brings into another order at every call.
        group_elements: elements in one group of torch's GroupNorm, which a GPU reads with one thread block.
        held_bytes: the most bytes on the device during an operator, without weights: inputs, outputs, the kernel's own
            memory and the library's workspace.
    """

    path: str
    flops: int = 0
    wide_flops: int = 0
    moved_bytes: int = 0
    product_bytes: int = 0
    copied_bytes: int = 0
    operators: int = 0
    packed_bytes: int = 0
    group_elements: int = 0
    held_bytes: int = 0


@dataclass(frozen=True)
class StepTiming:
    """The times of a step that a schedule needs, in addition to the bytes.

    Attributes:
        spans: seconds of modules by path, the component's name first, in the order of the run. A module may occur more
            than once; work between its children's calls counts as its own.
        copies: the cost of copying weights to the device.
        maps: the most bytes of activations on the device in each of ``spans``. Empty: unknown.
    """

    spans: tuple[tuple[str, float], ...]
    copies: CopyQueue
    maps: tuple[int, ...] = ()

    def select(self, components: Iterable[str]) -> StepTiming:
        """Times of some components' modules."""
        starts = tuple(f"{name}." for name in components)
        places = [number for number, (path, _) in enumerate(self.spans) if path.startswith(starts)]
        maps = tuple(self.maps[number] for number in places) if self.maps else ()
        return replace(self, spans=tuple(self.spans[number] for number in places), maps=maps)

    def followed_by(self, other: StepTiming) -> StepTiming:
        """Return these times followed by those of another component's step."""
        maps = (*self.maps, *other.maps) if bool(self.maps) == bool(other.maps) else ()
        return replace(self, spans=(*self.spans, *other.spans), maps=maps)


def timing_of(
    component: str,
    model: nn.Module,
    spans: Sequence[ModuleSpan],
    rates: Rates,
    size: int,
    copies: CopyQueue,
    layer: float | None = None,
) -> StepTiming:
    """Times of the modules of ``model`` with their weights streamed, and of a fetch, including the engine's own work.

    Args:
        component: the model's name.
        model: the model.
        spans: their work, as traced with all weights on the device.
        rates: rates of the device.
        size: bytes of an element.
        copies: the cost of copies.
        layer: host time of a call of a layer with weights, its fetch included, in operators; None: that of our engine.
    """
    layers = layers_with_weights(model)
    called, fetched = offload_launches(rates, layer)
    launched = [span.operators + (called if span.path in layers else 0.0) for span in spans]
    *seconds, fetch = rates.shares([*spans, ModuleSpan("")], size, [*launched, fetched])
    return StepTiming(
        tuple((f"{component}.{span.path}", taken) for span, taken in zip(spans, seconds, strict=True)),
        replace(copies, host_seconds=fetch),
    )


def offload_launches(rates: Rates, layer: float | None) -> tuple[float, float]:
    """Host time of a call of a layer whose weights are lent, and of a fetch, in launches.

    Args:
        rates: rates of the device.
        layer: of a call with its fetch, by another program; None: our engine runs.
    """
    return (rates.layer_launches, rates.fetch_launches) if layer is None else (layer, 0.0)


def layers_with_weights(model: nn.Module) -> set[str]:
    """Names of the modules of ``model`` that have weights of their own."""
    return {path for path, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}


def sort_by_timing(layers: Sequence[Layer], timing: StepTiming) -> list[Layer]:
    """Sort ``layers`` as a step uses them; a layer that the step does not use follows its predecessor."""
    owners = {layer.name: [number] for number, layer in enumerate(layers)}
    first: dict[str, None] = {}
    for path, _ in timing.spans:
        first.update((layers[number].name, None) for number in _owner(path, owners))
    return sort_as_called(layers, list(first))


def sort_as_called(layers: Sequence[Layer], called: Sequence[str]) -> list[Layer]:
    """``layers`` in the order of ``called``, by name; a layer that was not called follows its predecessor."""
    moments = {name: moment for moment, name in enumerate(called)}
    rank, ranks = -1, []
    for layer in layers:
        rank = moments.get(layer.name, rank)
        ranks.append(rank)
    return [layers[number] for number in sorted(range(len(layers)), key=ranks.__getitem__)]


def schedule_units(blocks: Sequence[Block], timing: StepTiming) -> list[WeightGroup]:
    """Return the units of a schedule for ``blocks``, which are in the order of the run.

    Modules without streamed weights count as part of the block that was used before.

    Args:
        blocks: in the order of the run.
        timing: times of a step's modules.
    """
    owners: dict[str, list[int]] = {}
    for number, block in enumerate(blocks):
        for layer in block.layers:
            owners.setdefault(layer.name, []).append(number)
    seconds, sizes, maps = [0.0] * len(blocks), [block.bytes for block in blocks], [0] * len(blocks)
    present: list[int] = []
    early = 0.0
    for (path, taken), held in zip(timing.spans, timing.maps or itertools.repeat(0), strict=False):
        present = _owner(path, owners) or present
        for number in present or range(min(1, len(blocks))):  # the first block is read ahead, before it computes
            maps[number] = max(maps[number], held)
        if not present:
            early += taken
        elif len(present) == 1:
            seconds[present[0]] += taken
        else:  # a layer that comes in parts
            total = sum(sizes[number] for number in present)
            for number in present:
                seconds[number] += taken * sizes[number] / total
    if present:  # the next step's beginning runs while the last block is still there
        seconds[present[-1]] += early
    facts = zip(blocks, seconds, maps, strict=True)
    return [WeightGroup(block.name, block.bytes, taken, held) for block, taken, held in facts]


def _owner(path: str, owners: dict[str, list[int]]) -> list[int]:
    """Whom the module ``path`` belongs to: itself, or what it is a part of; noted in ``owners``."""
    numbers = owners.get(path)
    if numbers is None:
        numbers = owners[path] = _owner(path.rpartition(".")[0], owners) if path else []
    return numbers
