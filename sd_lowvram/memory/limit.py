"""Limit torch's allocator to the budgets of plans while their calls run.

The limit is torch's own (``torch.cuda.set_per_process_memory_fraction``). It counts all segments of the process on a
GPU, whichever thread needs them, and not the driver's context. An allocation beyond it first frees unused segments,
then fails as on a full GPU, and the run continues with a plan that needs less. Between the calls of a run, and after
it, the limit is the user's own again. While a call runs, the limit also holds for what other threads load onto the GPU.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..compat.private import stream_handle, take_matrix_workspaces, tree_flatten
from ..progress import log_event
from ..units import MIB
from ..weights import all_tensors
from .accounts import tracing
from .threads import Shared

_NATIVE, _ASYNC = "native", "cudaMallocAsync"
"""torch's names of its own allocator and of CUDA's pools. Other allocators have no limit."""

_NOTICED = 32 * MIB
"""A larger change of allocated bytes between two calls of a stage begins a new run."""


def limits_reserved() -> bool:
    """Return True if torch's limit counts reserved bytes; False for ``cudaMallocAsync``, where it counts allocated
    bytes."""
    return torch.cuda.get_allocator_backend() == _NATIVE


def is_limitable(device: torch.device) -> bool:
    """Return True if planned calls on ``device`` may be limited.

    ComfyUI's memory manager reads the GPU's free memory and loads as much as that: in its process nothing is limited.
    """
    if device.type != "cuda" or "comfy.model_management" in sys.modules:
        return False
    return torch.cuda.get_allocator_backend() in (_NATIVE, _ASYNC)


# The limit of a GPU


_fractions: dict[int, float] = {}
"""The fraction that was set last, by GPU, for versions of torch that do not report it (before 2.6)."""

_stated: set[int] = set()
"""GPUs whose fraction the user has set while :func:`setter_followed` was active, for the same versions of torch."""


def fraction_of(device: torch.device | int) -> float:
    """Return the part of a GPU that torch may reserve; 1.0 if it is unknown."""
    index = _index(device)
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    # where no limit was ever set, cudaMallocAsync reports far more than the GPU has
    return min(1.0, float(ask(index))) if ask else _fractions.get(index, 1.0)


@Shared
@contextlib.contextmanager
def setter_followed() -> Iterator[None]:
    """Note every fraction that the user sets, for versions of torch that do not report it."""
    if _is_reported():
        yield
        return
    setter = torch.cuda.set_per_process_memory_fraction

    @functools.wraps(setter)
    def follow(fraction: float, device: Any = None) -> None:
        setter(fraction, device)
        index = _index(torch.device("cuda") if device is None else device)
        _fractions[index] = fraction
        _stated.add(index)

    torch.cuda.set_per_process_memory_fraction = follow
    try:
        yield
    finally:
        if torch.cuda.set_per_process_memory_fraction is follow:
            torch.cuda.set_per_process_memory_fraction = setter
        _fractions.clear()
        _stated.clear()


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


_warned: set[int] = set()
"""GPUs of which it was logged that their limit is 1.0 after planned calls."""


class _Card:
    """One GPU: its plans, and the limits of the calls that run, the innermost last."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.plans: weakref.WeakSet[Bound] = weakref.WeakSet()
        self.unplanned_bytes = 0
        self._lock = threading.RLock()
        self._limits: dict[object, float] = {}
        self._users = self._ours = 1.0

    def begin(self, call: object, most_bytes: int) -> None:
        """Set the limit for ``call``: ``most_bytes``, or the user's own if that is lower."""
        total = torch.cuda.get_device_properties(self.index).total_memory
        with self._lock:
            if not self._limits or fraction_of(self.index) != self._ours:
                self._users = fraction_of(self.index)
            self._limits[call] = max(0.0, (most_bytes + 1) / total)
            self._set()

    def end(self, call: object) -> None:
        """Set the limit of the call around ``call``, or the user's own again. A limit that was set meanwhile stays."""
        with self._lock:
            if self._limits.pop(call, None) is None:
                return
            if fraction_of(self.index) != self._ours:
                self._users = fraction_of(self.index)
            self._set()
        if not self._limits and not _is_reported() and self.index not in _stated | _warned:
            _warned.add(self.index)
            log_event(
                __name__,
                "this version of torch does not report set_per_process_memory_fraction: after planned calls it is 1.0 "
                "unless it is set after optimize()",
            )

    def _set(self) -> None:
        limit = min([self._users, *list(self._limits.values())[-1:]])
        if limit != fraction_of(self.index):
            setter = torch.cuda.set_per_process_memory_fraction
            with torch.cuda.device(self.index):  # the setter leaves its GPU as the current one
                getattr(setter, "__wrapped__", setter)(limit, self.index)
            if not _is_reported():
                _fractions[self.index] = limit
        self._ours = fraction_of(self.index)

    def measure_unplanned(self, inputs: Iterable[Tensor]) -> None:
        """Free unused segments, then count the bytes that are reserved for tensors of no plan.

        Args:
            inputs: tensors among the arguments of the call that begins; the plan counts them.
        """
        with torch.cuda.device(self.index):
            torch.cuda.empty_cache()
        components = [part for bound in list(self.plans) for part in bound.components]
        here = torch.device("cuda", self.index)
        tensors = [tensor for tensor in (*all_tensors(*components), *inputs) if tensor.device == here]
        storages = (tensor.untyped_storage() for tensor in tensors)
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages} | _live_buffers(self.index)
        if limits_reserved():
            take_workspaces(here)
            pools = {pool for model in components for pool in _pools.get(model, ())}
            self.unplanned_bytes = _unplanned_bytes(self.index, sorted(sizes), pools)
        else:
            self.unplanned_bytes = max(0, torch.cuda.memory_allocated(self.index) - sum(sizes.values()))


def _is_reported() -> bool:
    return hasattr(torch.cuda, "get_per_process_memory_fraction")


_cards: dict[int, _Card] = {}


# What is planned, and what is not

_buffers: list[tuple[StorageWeakRef, int, int, int]] = []
"""Buffers of weights on GPUs: reference, GPU, address, bytes."""

_buffers_lock = threading.Lock()

atexit.register(_buffers.clear)  # a reference cannot be freed once torch's modules are gone

_workspaces: dict[int, dict[tuple[int, int], set[tuple[int, int]]]] = {}
"""Addresses and bytes of the workspaces that planned calls made cuBLAS allocate, by GPU, then by thread and stream."""


def note_buffer(buffer: Tensor) -> None:
    """Note a buffer of streamed weights as planned."""
    if buffer.device.type != "cuda":
        return
    storage = buffer.untyped_storage()
    with _buffers_lock:
        _buffers[:] = [entry for entry in _buffers if not entry[0].expired()]
        _buffers.append((StorageWeakRef(storage), _index(buffer.device), storage.data_ptr(), storage.nbytes()))


def _live_buffers(index: int) -> dict[int, int]:
    """Addresses and bytes of the buffers on a GPU that exist."""
    with _buffers_lock:
        return {address: size for ref, at, address, size in _buffers if at == index and not ref.expired()}


_pools: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, int]]] = weakref.WeakKeyDictionary()
"""Numbers, in torch's allocator, of the memory pools that recorded passes of a model have or had.

A library's workspace may stay in a pool whose recordings are freed. torch gives no number twice.
"""


def note_pool(pool: tuple[int, int], model: nn.Module) -> None:
    """Note the memory pool of a model's recorded passes, which the plan of the model counts."""
    _pools.setdefault(model, []).append(pool)


def take_workspaces(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces for this thread and the current stream, and note them as planned.

    Those that it has already stay what they are: noted, or unplanned because another program's product took them. torch
    may have freed those that were noted before, and given their memory to others.
    """
    if not limits_reserved():
        take_matrix_workspaces(device)
        return
    index = _index(device)
    before, allocated = _blocks_in_use(_segments(index)), torch.cuda.memory_allocated(index)
    take_matrix_workspaces(device)
    if torch.cuda.memory_allocated(index) == allocated:
        return
    taken = _blocks_in_use(_segments(index)) - before
    _workspaces.setdefault(index, {})[threading.get_ident(), stream_handle(index)] = taken


def _segments(index: int) -> list[Any]:
    return [one for one in torch.cuda.memory_snapshot() if one["device"] == index]


def _blocks_in_use(segments: Iterable[Any]) -> set[tuple[int, int]]:
    """Addresses and bytes of the blocks of ``segments`` that are in use."""
    return {block for one in segments for block in _used_blocks(one)}


def _used_blocks(segment: Any) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of a segment's blocks in use."""
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield address, block["size"]
        address += block["size"]


def _unplanned_bytes(index: int, planned: Sequence[int], pools: Collection[tuple[int, int]]) -> int:
    """Unplanned bytes: all of a segment that holds only unplanned blocks; of another segment, its unplanned blocks.

    Workspaces of cuBLAS that planned calls took count as planned. A segment of a private pool, such as that of a CUDA
    graph, is planned or not as a whole: torch gives it to nothing else.

    Args:
        planned: sorted addresses of planned tensors.
        pools: memory pools of planned recorded passes.
    """
    unplanned, workspaces = 0, set().union(*list(_workspaces.get(index, {}).values()))
    for one in _segments(index):
        pool = tuple(one.get("segment_pool_id", (0, 0)))
        if pool != (0, 0):
            unplanned += 0 if pool in pools else one["total_size"]
            continue
        blocks = list(_used_blocks(one))
        foreign = [block for block in blocks if block not in workspaces and not _is_within(planned, *block)]
        others = sum(size for _, size in foreign)
        alone = len(foreign) == len(blocks)
        unplanned += one["total_size"] if others and alone else others
    return unplanned


def _is_within(addresses: Sequence[int], start: int, size: int) -> bool:
    place = bisect.bisect_left(addresses, start)
    return place < len(addresses) and addresses[place] < start + size


_repeats: ContextVar[bool] = ContextVar("repeats", default=False)
"""True while a call is repeated."""


@contextlib.contextmanager
def call_repeated() -> Iterator[None]:
    """Begin no new run within the block, in which a leaner plan repeats a call that ran out of memory.

    Tensors that the run has made so far, such as the maps of a ControlNet, are no unplanned ones.
    """
    before = _repeats.set(True)
    try:
        yield
    finally:
        _repeats.reset(before)


_PLACES = {"text": 0, "encode": 0, "control": 1, "denoise": 1, "decode": 2}
"""Stages in the order in which a run comes to them."""


class Bound:
    """The budget of one plan on a GPU, and the calls that it limits.

    A call begins a new run if its stage comes before the stage of the last call; or if much was allocated or freed
    since a call of the same stage, and since the same model was called (a ControlNet's maps end between its calls).
    Unplanned tensors are counted at that call, and their number of bytes stays the same during the run. The limit is
    this number plus the budgets of all attached plans that have run on the GPU, less the driver's context.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        context_bytes: int,
        stages: Mapping[str, str],
        components: Iterable[nn.Module],
    ) -> None:
        """
        Args:
            device: the GPU.
            budget_bytes: the budget, with the driver's context.
            context_bytes: the driver's context.
            stages: name of the stage of each component.
            components: the models of the plan.
        """
        self.components = list(components)
        self.budget_bytes = budget_bytes
        self._context_bytes = context_bytes
        self._stages = dict(stages)
        self._card = _cards.setdefault(_index(device), _Card(_index(device)))
        self._last: int | None = None
        self._left = self._running = 0
        self._allocated: dict[tuple[str, str], int] = {}
        self._following = contextlib.ExitStack()
        self._following.enter_context(setter_followed())

    def close(self) -> None:
        """Forget the plan: its budget is added to no other's."""
        self._card.plans.discard(self)
        self._following.close()

    @contextlib.contextmanager
    def during(self, component: str, entry: str, inputs: Any) -> Iterator[None]:
        """Limit torch's allocator within the block, a call of one of the models.

        Args:
            component: name of the model.
            entry: the method that is called.
            inputs: its arguments.
        """
        if tracing():
            yield
            return
        place = self._place(component, entry)
        self._card.plans.add(self)
        allocated, called = self._beside_buffers(), (component, entry)
        levels = self._left, self._allocated.get(called, self._left)
        begins = self._begins(place, min(abs(allocated - level) for level in levels))
        if begins and not self._running and not _repeats.get():
            self._allocated.clear()
            leaves = tree_flatten(inputs)[0]
            self._card.measure_unplanned(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._last, self._allocated[called] = place, allocated
        budgets = sum(bound.budget_bytes for bound in list(self._card.plans))
        call = object()
        self._running += 1
        try:
            self._card.begin(call, self._card.unplanned_bytes + budgets - self._context_bytes)
            yield
        except BaseException:
            self._last = None  # the next call begins a new run
            raise
        finally:
            self._running -= 1
            self._card.end(call)
            self._left = self._beside_buffers()

    def _beside_buffers(self) -> int:
        """Bytes that are allocated on the GPU besides buffers of weights, which come and go within a run."""
        return torch.cuda.memory_allocated(self._card.index) - sum(_live_buffers(self._card.index).values())

    def _place(self, component: str, entry: str) -> int:
        """The place of a call in a run; for a model that has no stage, the place of the last call."""
        name = entry if entry in _PLACES else self._stages.get(component, "")
        return _PLACES.get(name, self._last or 0)

    def _begins(self, place: int, changed_bytes: int) -> bool:
        return self._last is None or place < self._last or (place == self._last and changed_bytes > _NOTICED)
