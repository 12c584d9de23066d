"""The device buffer: layers that always stay, then the residents of the schedule, then the ring."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..compat.private import storage_key
from ..errors import BudgetError
from ..memory.accounts import actual_device
from ..memory.fake_mode import active_fake_mode
from ..memory.reserved import bytes_to_ask_for
from ..units import format_least, format_size
from ..weight_parts import Link
from ..weights import copied_tensor, ordinary_as, set_data
from .blocks import Block, Blocks, Granularity, blocks_of
from .copier import Copy
from .layers import Layer, place_bytes
from .pool import Pool
from .schedule import Schedule, align, lay_out, spread
from .search import best_schedule, smallest_schedule
from .simulator import CopyQueue
from .timing import StepTiming, schedule_units, sort_as_called, sort_by_timing

STAYING = -1
"""The number of what stays whatever the schedule says."""

_SPLIT = 2
"""Parts in the buffer: a part is fetched while another one computes."""
_SMALL = 1 << 16
"""The smallest part in bytes: the layers of a very small model are not split."""


@dataclass(frozen=True)
class ResidencyPolicy:
    """Amount and choice of a model's weights on the device.

    Attributes:
        kind: "whole": all weights. "halves": one half of the bytes at a time. "blocks": as many as fit stay, the rest
            passes through a ring. "layer": no layer stays; if ``timing`` has the activations, the ring follows them.
        device_bytes: bytes for weights on the device, ring included. None: the least with which one copy overlaps with
            compute: two of the largest layers, one half, or with ``split`` half of the largest layer; in any case what
            stays plus one block.
        split: split layers that are larger than half of the buffer into parts of output rows.
        timing: how long a step's modules take. None: as many bytes as possible stay.
        grows: enlarge a buffer that does not hold what stays and the largest block; it was chosen for another model.
        together: residual blocks and transformers run piece by piece (guidance halves, strips, chunks), so that their
            layers alternate many times: each of them is one block if it fits.
    """

    kind: Literal["whole", "halves", "blocks", "layer"]
    device_bytes: int | None = None
    split: bool = False
    timing: StepTiming | None = None
    grows: bool = False
    together: bool = False


@dataclass(frozen=True, eq=False)
class WeightSlot:
    """A weight of a block on the device.

    Attributes:
        tensor: the parameter or buffer, or a part of a quantised one.
        host: its contents while it is not lent; ``source`` is the part of these that belongs to the block.
        view: its place in the device buffer.
        lent: the tensor that a layer sees: ``tensor`` itself, with other contents, or what takes the place of a part.
    """

    tensor: Tensor
    host: Tensor
    source: Tensor
    view: Tensor
    lent: Tensor


@dataclass(frozen=True, eq=False)
class LentLink:
    """A link, and what takes the place of its value on the device."""

    link: Link
    lent: Tensor

    def lend(self) -> None:
        """Put the device's tensor where the link's is."""
        self.link.exchange(self.link.value, self.lent)

    def take_back(self) -> bool:
        """Put the link's own tensor back; return False if a layer has put another one there meanwhile."""
        return self.link.exchange(self.lent, self.link.value)


class DeviceLayout:
    """The blocks of one or more models and their places in the device buffer.

    Attributes:
        blocks: the units of the schedule, in the order of a run.
        bytes: the most that is on the device while the buffer exists.
        residents: numbers of the blocks that stay; ``streamed``: of those that pass through the ring, sorted.
        rooms: ring sizes of the schedule. If there are any, a block has an allocation of its own, fetch to end of use.
        places: slots by number of the block, while the buffer exists.
        links: links by number of the block, likewise.
    """

    def __init__(self, parts: Blocks, schedule: Schedule) -> None:
        """
        Args:
            parts: the blocks.
            schedule: their places in the buffer.
        """
        self.blocks = parts.streamed
        self.schedule = schedule
        self.bytes = parts.staying_bytes + schedule.device_bytes
        self.residents = schedule.resident
        self.streamed = sorted(fetch.unit for fetch in schedule.fetches)
        self.rooms = schedule.rooms
        self.places: dict[int, list[WeightSlot]] = {}
        self.links: dict[int, list[LentLink]] = {}
        self._copies: dict[int, list[Copy]] = {}
        self._waiting: dict[int, list[_HostWeight]] = {}
        self._parts = parts
        self._spans = dict(self._place_units(parts.staying_bytes))

    def _place_units(self, offset: int) -> Iterator[tuple[int, tuple[int, int]]]:
        for number in sorted(self.residents):
            yield number, (offset, offset + self.blocks[number].bytes)
            offset += self.blocks[number].bytes
        for fetch in () if self.rooms else self.schedule.fetches:
            start = offset + fetch.offset
            yield fetch.unit, (start, start + self.blocks[fetch.unit].bytes)

    @functools.cached_property
    def overlapping(self) -> dict[int, tuple[int, ...]]:
        """Map each streamed block to the other blocks that share bytes of the ring with it."""
        met: dict[int, list[int]] = {number: [] for number in self.streamed}
        here: list[int] = []
        if self.rooms:
            return dict.fromkeys(self.streamed, ())
        for number in sorted(self.streamed, key=self._spans.__getitem__):
            start, _ = self._spans[number]
            here = [other for other in here if self._spans[other][1] > start]
            for other in here:
                met[number].append(other)
                met[other].append(number)
            here.append(number)
        return {number: tuple(sorted(others)) for number, others in met.items()}

    def layers(self) -> Iterator[Layer]:
        """Yield all layers."""
        yield from self._parts.staying
        yield from self._parts.lookups
        yield from (layer for block in self.blocks for layer in block.layers)

    def streamed_tensors(self, apart: bool = False) -> Iterator[Tensor]:
        """Yield the weights that pass through the ring, in the order of a step; a split layer's once for each part.

        Args:
            apart: True to order them so that the first N, for any N, are spread evenly over the step. If these are
                pinned or cached, the disk reads the rest at a steady rate.
        """
        order = (self.streamed[number] for number in spread(len(self.streamed))) if apart else self.streamed
        return (tensor for number in order for tensor in self.blocks[number].tensors)

    def roles(self) -> dict[int, tuple[int, ...] | None]:
        """Map the id of a layer's module to the numbers of its blocks: () if it stays, None if it is a table."""
        roles: dict[int, tuple[int, ...] | None] = {id(layer.module): () for layer in self._parts.staying}
        roles |= {id(layer.module): None for layer in self._parts.lookups}
        for number, block in enumerate(self.blocks):
            for layer in block.layers:
                roles[id(layer.module)] = (*(roles.get(id(layer.module)) or ()), number)
        return roles

    @property
    def open(self) -> bool:
        """True while the buffer exists."""
        return bool(self.places)

    def take_room(self, device: torch.device) -> None:
        """Allocate the buffer and make all views."""
        size = self.bytes - (self.schedule.ring_bytes if self.rooms else 0)
        pool = Pool(bytes_to_ask_for(size) if actual_device(device).type == "cuda" else size, device)
        staying = list({id(t): t for layer in self._parts.staying for t in layer.tensors}.values())
        self._lay(STAYING, pool, _waiting(staying, None), 0)
        for number, block in enumerate(self.blocks):
            waiting = _waiting(block.tensors, block)
            if number in self._spans:
                self._lay(number, pool, waiting, self._spans[number][0])
            else:
                self._waiting[number] = waiting

    def _lay(self, number: int, pool: Pool, waiting: Sequence[_HostWeight], offset: int) -> None:
        layers = self._parts.staying if number == STAYING else self.blocks[number].layers
        links = [link for layer in layers for link in layer.links]
        parts = {id(part) for link in links for part in link.parts}
        self.places[number], self._copies[number] = _place_block(pool, waiting, offset, parts)
        self.links[number] = _lent_links(links, self.places[number])

    def take(self, number: int, device: torch.device) -> None:
        """Allocate memory for a streamed block, if the ring follows the activations.

        Args:
            number: number of the block.
            device: where to allocate it.
        """
        self._lay(number, Pool(self.blocks[number].bytes, device), self._waiting[number], 0)

    def drop(self, number: int) -> None:
        """Free the allocation of :meth:`take`."""
        del self.places[number], self.links[number], self._copies[number]

    def give_room_back(self) -> None:
        """Free the buffer and all views."""
        self.places, self.links, self._copies, self._waiting = {}, {}, {}, {}

    def hand_back(self) -> None:
        """Point every weight at its host memory."""
        for places in self.places.values():
            for place in places:
                set_data(place.lent, place.host)
        for links in self.links.values():
            for link in links:
                link.take_back()

    def placed(self, number: int) -> tuple[list[WeightSlot], list[LentLink], list[Copy]]:
        """The slots and links of a block, and the copies that bring it to the device."""
        return self.places[number], self.links[number], self._copies[number]


@dataclass(frozen=True, eq=False)
class _HostWeight:
    """A weight in host memory, as in :class:`WeightSlot`.

    Attributes:
        like: has the strides that its copy is to have.
        bytes: this weight's, and those of the ``more`` weights behind it that one copy brings with it.
    """

    tensor: Tensor
    host: Tensor
    source: Tensor
    like: Tensor
    more: int = 0
    bytes: Tensor | None = None


def _waiting(tensors: Sequence[Tensor], block: Block | None) -> list[_HostWeight]:
    """Host weights of ``tensors``, none of them lent, sorted by address, so that one copy moves many."""
    with torch.inference_mode(False), torch.no_grad():
        held = [tensor.data for tensor in tensors]
        if active_fake_mode(*held) is None:
            tensors = sorted(tensors, key=lambda tensor: (storage_key(tensor), _start(tensor)))
            held = [tensor.data for tensor in tensors]
        sources = [data if block is None else block.part(data) for data in held]
        weights = list(map(_HostWeight, tensors, held, sources, map(copied_tensor, tensors, sources)))
        first = len(weights)
        for number in reversed(range(len(weights))):
            if not number or not _adjoin(*weights[number - 1 : number + 1]):
                run, first = weights[number:first], number
                if len(run) > 1:
                    weights[number] = replace(
                        run[0], more=len(run) - 1, bytes=_byte_span(run[0].source, run[-1].source)
                    )
    return weights


def _adjoin(first: _HostWeight, second: _HostWeight) -> bool:
    """True if two sources are as far apart in host memory as their slots on the device, so that one copy moves both."""
    if active_fake_mode(first.source) is not None or any(
        weight.source.stride() != weight.like.stride() for weight in (first, second)
    ):
        return False
    storages = [storage_key(weight.source) for weight in (first, second)]
    return storages[0] == storages[1] and _start(second.source) - _start(first.source) == place_bytes(first.like)


def _start(tensor: Tensor) -> int:
    """Bytes before it in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _byte_span(first: Tensor, last: Tensor) -> Tensor:
    """The bytes from the beginning of one tensor to the end of another in the same storage."""
    start, stop = _start(first), _start(last) + last.nbytes
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), start, (stop - start,), (1,))


def _place_block(
    pool: Pool, waiting: Sequence[_HostWeight], offset: int, parts: Set[int]
) -> tuple[list[WeightSlot], list[Copy]]:
    """The places of a block from ``offset`` on, and the copies that bring it there.

    Args:
        parts: ids of parts of quantised weights.
    """
    views = pool.views((weight.like for weight in waiting), offset)
    places = []
    for weight, bare in zip(waiting, views, strict=True):
        view = ordinary_as(weight.tensor, bare)
        lent = view.data if id(weight.tensor) in parts else weight.tensor  # with a counter of its own of its writes
        places.append(WeightSlot(weight.tensor, weight.host, weight.source, view, lent))
    copies, number = [], 0
    while number < len(waiting):
        weight, view = waiting[number], views[number]
        copies.append(
            (weight.source, view)
            if weight.bytes is None
            else (weight.bytes, pool.span(_start(view), weight.bytes.nbytes))
        )
        number += 1 + weight.more
    return places, copies


def _lent_links(links: Iterable[Link], places: Iterable[WeightSlot]) -> list[LentLink]:
    there = {id(place.tensor): place for place in places}
    made = []
    for link in links:
        if link.memory is not None:
            made.append(LentLink(link, there[id(link.memory)].view.data))
        else:
            made.append(LentLink(link, link.made_of({id(part): there[id(part)].lent for part in link.parts})))
    return made


def lay_down(
    layers: Sequence[Layer], policy: ResidencyPolicy, orders: dict[str, list[str]], near: bool = False
) -> DeviceLayout:
    """Lay out blocks and places for ``layers``.

    Args:
        layers: the layers of one or more models.
        policy: how many bytes the device may hold, and which weights stay.
        orders: for each model that has run, the names of its layers as it called them.
        near: as for :func:`best_schedule`.

    Returns:
        The blocks, their schedule and their places; nothing is allocated yet.

    Raises:
        BudgetError: a block is larger than the buffer may be.
    """
    if policy.timing is not None:
        layers = sort_by_timing(layers, policy.timing)
    parts, capacity = _split_blocks(_sort_as_learned(layers, orders), policy)
    if capacity is not None and capacity < _least(parts):
        helps = not policy.split and _least(blocks_of(layers, _granularity(policy), _part(capacity, parts))) <= capacity
        raise _buffer_error(capacity, parts, ", or let layers be split (split_layers)" if helps else "")
    return DeviceLayout(parts, _schedule(parts, policy, capacity, near))


def most_bytes(layers: Sequence[Layer], policy: ResidencyPolicy) -> int:
    """Return the most bytes of weights on the device, without searching for a schedule.

    Args:
        layers, policy: as for :func:`lay_down`.
    """
    parts, capacity = _split_blocks(layers, policy)
    return parts.bytes if capacity is None else min(capacity, parts.bytes)


def _granularity(policy: ResidencyPolicy) -> Granularity:
    return "halves" if policy.kind == "halves" else "blocks"


def _split_blocks(layers: Sequence[Layer], policy: ResidencyPolicy) -> tuple[Blocks, int | None]:
    """The blocks of ``layers``, and the bytes for them on the device."""
    granularity = _granularity(policy)
    parts = blocks_of(layers, granularity)
    capacity = _room(policy, parts)
    if capacity is not None and parts.bytes > capacity and (policy.split or policy.together):
        part, largest = _part(capacity, parts), max(block.bytes for block in parts.streamed)
        together = min(max(1, capacity - parts.staying_bytes), 2 * largest) if policy.together else 0
        parts = blocks_of(layers, granularity, part if policy.split else None, together, part if policy.together else 0)
    if capacity is not None and (policy.device_bytes is None or policy.grows):
        capacity = max(capacity, _least(parts))
    return parts, capacity


def _room(policy: ResidencyPolicy, parts: Blocks) -> int | None:
    """Bytes on the device; None: as many as there are."""
    if policy.kind == "whole" or policy.device_bytes is not None:
        return policy.device_bytes
    if policy.kind == "halves":
        return _least(parts)
    tensor = max((place_bytes(tensor) for block in parts.streamed for tensor in block.tensors), default=0)
    if policy.split:  # in a very small model what stays may be more than half of the largest layer
        return max(tensor // 2, parts.staying_bytes + max(tensor // 4, _SMALL))
    return 2 * tensor


def _least(parts: Blocks) -> int:
    """The smallest buffer: what stays, plus the largest block."""
    return parts.staying_bytes + max((block.bytes for block in parts.streamed), default=0)


def _part(capacity: int, parts: Blocks) -> int:
    """Bytes of a part of a layer that is split."""
    return max(1, capacity - parts.staying_bytes) // _SPLIT


def _buffer_error(capacity: int, parts: Blocks, otherwise: str) -> BudgetError:
    """The error for a buffer that does not hold what stays plus the largest block."""
    least, largest = _least(parts), max(parts.streamed, key=lambda block: block.bytes)
    return BudgetError(
        f"{format_size(capacity)} of weights on the device are too few for {largest.name}, which has "
        f"{format_size(largest.bytes)}: give {format_least(least)} or more{otherwise}",
        needed_bytes=least,
        stage=largest.name,
        limit="ring",
    )


def _schedule(parts: Blocks, policy: ResidencyPolicy, capacity: int | None, near: bool) -> Schedule:
    units = parts.units()
    if capacity is None or (parts.bytes <= capacity and policy.kind != "layer"):
        return lay_out(units, range(len(units)), 0)
    capacity = max(0, capacity - parts.staying_bytes)
    if policy.kind == "blocks" and policy.timing is not None:
        return best_schedule(schedule_units(parts.streamed, policy.timing), capacity, policy.timing.copies, near)
    if policy.kind == "blocks":
        return best_schedule(units, capacity, CopyQueue(1.0, overlap=False), near)
    capacity = min(capacity, sum(align(unit.bytes) for unit in units))
    ring = lay_out(units, (), capacity)
    plain = policy.device_bytes is None and not policy.split and not policy.together
    if policy.kind == "layer" and plain and policy.timing is not None:
        return smallest_schedule(schedule_units(parts.streamed, policy.timing), ring, policy.timing.copies)
    return ring


def _sort_as_learned(layers: Sequence[Layer], orders: dict[str, list[str]]) -> Sequence[Layer]:
    """The layers of each model that has run in the order in which it called them, in the places of its layers."""
    result = list(layers)
    for component, order in orders.items():
        seats = [number for number, layer in enumerate(layers) if layer.component == component]
        for seat, layer in zip(seats, sort_as_called([layers[number] for number in seats], order), strict=True):
            result[seat] = layer
    return result
