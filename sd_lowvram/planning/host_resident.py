"""Host memory of waiting weights, and the part that is read when it is copied."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..devices.disk import ASSUMED, disk_rate
from ..devices.performance import THIS
from ..hooks.numbers.channels_last import reordered_weights
from ..knob import Act
from ..memory.pinned import PINNED_SHARE, most_pinned_bytes
from ..memory.threads import pause_models
from ..models.anatomy import Anatomy
from ..settings import Settings, acts
from ..streaming.host_weights import RING_BYTES, bytes_also_in_files, least_host_bytes
from ..streaming.mapped_files import MappedFiles, can_read_past_cache
from ..streaming.simulator import CopyQueue
from ..units import MIB
from ..weights import all_tensors
from .request import Budget, Request

_PINNED_STEP = 256 * MIB


@dataclass(frozen=True)
class HostResidentWeights:
    """Bytes of streamed weights in host memory.

    Attributes:
        host_bytes: host memory that they use.
        least_bytes: host memory with which they would work.
        copied_bytes: the part of ``host_bytes`` that is also in a mapped file.
        pinned_bytes: weights that are copied at the bus' rate; None: all. The rest is read while these are copied.
        cached_bytes: the part of that rest that fits the system's cache; None: all of it. What is left is read from
            disk.
    """

    host_bytes: int
    least_bytes: int
    copied_bytes: int = 0
    pinned_bytes: int | None = None
    cached_bytes: int | None = None


def host_resident(weights: int, mapped: int, ram: int, pinnable: int | None) -> HostResidentWeights:
    """Distribute ``weights`` bytes, ``mapped`` of them in mapped files, over ``ram`` bytes of host memory.

    Mapped weights need only the ring through which they pass, and are faster with more memory.

    Args:
        weights: bytes that wait in host memory.
        mapped: the part of them in mapped files.
        ram: budget of the host in bytes.
        pinnable: the most bytes that can be page-locked, ring included; None: all.

    Returns:
        Bytes in pinned memory, in ordinary memory, in the system's cache and on disk.
    """
    mapped = min(mapped, weights)
    least = least_host_bytes(weights, mapped)
    pinned = max(0, min(ram, pinnable if pinnable is not None else ram) - RING_BYTES)
    if pinned >= weights:
        return HostResidentWeights(weights, least, mapped)
    taken = max(least, min(ram, weights + RING_BYTES)) if mapped else weights
    cached = max(0, ram - RING_BYTES - pinned) if mapped and ram < weights + RING_BYTES else None
    return HostResidentWeights(taken, least, max(0, taken - (weights - mapped)), pinned, cached)


def read_bytes(component: str, order: Sequence[str], weights: Mapping[str, int], held: int | None) -> int:
    """Return the bytes of one component that are not held, if ``held`` bytes are filled in ``order``.

    Args:
        component: name of the component.
        order: names of all components, those that are held first at the front.
        weights: bytes by component.
        held: bytes that are held; None: all.
    """
    if held is None or component not in order:
        return 0
    before = sum(weights[name] for name in order[: order.index(component)])
    return weights[component] - min(weights[component], max(0, held - before))


class HostMemory:
    """Host memory of one request: how waiting weights share it, and the cost of copying them from there.

    Attributes:
        budget: the request's bytes of host memory.
    """

    def __init__(self, anatomy: Anatomy, request: Request, stays_in_file: Callable[[str, Settings], bool]) -> None:
        """
        Args:
            anatomy: parts of the target.
            request: budget and device.
            stays_in_file: function that is True if settings use a component's weights as their files store them.
        """
        self.budget = Budget(request.ram)
        self._stays_in_file = stays_in_file
        self._anatomy = anatomy
        self._request = request
        self._on_gpu = request.device.type != "cpu"
        self._here = request.rates.name == THIS
        self._locks_all = False

    def all_locked(self) -> HostMemory:
        """The same memory, all of which can be page-locked; its answers leave the budget's interval as it is."""
        other = copy.copy(self)
        other._locks_all = True
        return other

    def hold(self, settings: Settings, weights: int, parked: int) -> HostResidentWeights:
        """Distribute ``weights`` bytes over the host memory that ``parked`` bytes of maps leave."""
        mapped = sum(size for name, (size, _) in self._in_files.items() if self._stays_in_file(name, settings))
        pinnable = None if self._pinnable is None else max(0, self._pinnable - parked)
        resident = host_resident(weights, mapped, self._request.ram - parked, pinnable)
        if self._locks_all:
            return dataclasses.replace(resident, pinned_bytes=None, cached_bytes=None)
        if resident.pinned_bytes is None:
            share = PINNED_SHARE if self._on_gpu and not self._here else 1
            self.budget.holds(math.ceil((weights + parked + RING_BYTES) / share))
        used = resident.host_bytes + parked if resident.pinned_bytes is None else self._request.ram
        for more in (0, 1):  # budgets above this use give the same plan; if all RAM is used, this one alone does
            self.budget.holds(used + more)
        return resident

    def copies(self, component: str, settings: Settings, held: HostResidentWeights) -> CopyQueue:
        """Return the cost of copying a component's weights to the device, with ``held`` weights waiting."""
        rates, (size, kernels) = self._request.rates, self._in_files[component]
        filling = rates.filling(size, kernels if Act.REORDERS_KERNELS in acts(settings) else 0)
        overlap = self._on_gpu and self._request.pace.overlaps
        copies = CopyQueue(rates.copy_bandwidth, overlap=overlap, reading=filling, pinned=held.pinned_bytes)
        if held.cached_bytes is None or not size or not self._stays_in_file(component, settings):
            return copies
        cached = held.cached_bytes
        if not can_read_past_cache() and size > (held.pinned_bytes or 0) + cached:
            cached = 0  # it drops what was read longest ago: of weights that are read in a circle, everything
        return dataclasses.replace(copies, disk=self.disk, cached=cached)

    @functools.cached_property
    def disk(self) -> float:
        """Bytes a second of the disk under the weights; measured only if not all weights fit in memory."""
        if self._request.disk is None and self._here:
            files = MappedFiles()
            tensors = all_tensors(*self._anatomy.components.values())
            file = next(filter(None, map(files.file, tensors)), None)
            return (disk_rate(Path(file)) if file else None) or ASSUMED
        return self._request.disk or ASSUMED

    @functools.cached_property
    def _pinnable(self) -> int | None:
        """The most that may be page-locked, the same for a whole search; None: all, where nothing is copied to a GPU.

        Of another machine's memory the budget is all that is known. Here the figure comes in steps, so that a plan in
        the cache serves the next request.
        """
        if not self._here:
            return int(PINNED_SHARE * self._request.ram) if self._on_gpu else None
        most = most_pinned_bytes()
        return most - most % min(_PINNED_STEP, max(1, most // 8))

    @functools.cached_property
    def _in_files(self) -> dict[str, tuple[int, int]]:
        """Bytes of each component that are read from a mapped file as they are, if no knob converts them.

        The second number is the part in convolution kernels, which channels last reorders.
        """
        parts = self._anatomy.components
        with pause_models(parts.values()):  # weights that are lent to a call are not in their files
            return {
                name: (bytes_also_in_files(all_tensors(part)), bytes_also_in_files(reordered_weights(part)))
                for name, part in parts.items()
            }
