"""Streamed weights in host memory: where they are stored, how much memory that needs, how they reach the device.

A host weight is what a weight's tensor holds while the weight is not on the device. Copies that overlap with compute
need pinned memory, which the system cannot swap out. So host weights are pinned up to a share of the machine's memory
and of the run's budget. The rest stays where it is: for a checkpoint that safetensors opened, in the mapped file.
Their bytes pass through a small pinned ring and are reordered (channels last) on the way. The system's cache holds as
much of the file as the budget allows; the rest is read directly, past the cache, in every step. Nothing is stored
twice: a weight with a pinned copy frees its first memory, unless that is the file.

On a CPU-only machine "pinned" memory is ordinary memory in the host's account; everything else is equal.
Fidelity: ``bitwise``.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..compat.private import storage_key
from ..memory import host_empty, mark_host
from ..memory.accounts import unmark_host
from ..memory.fake_mode import active_fake_mode
from ..memory.host_offload import dense_order, inverse, is_pinned, unpin
from ..memory.pinned import pinnable_bytes, pinned_empty, unlock_ended, whole_pages
from ..memory.threads import pause_models
from ..units import MIB
from ..weights import all_tensors, copied_tensor, ordinary_mode, same_bits, set_data
from .mapped_files import MappedFiles, PastCache, can_read_past_cache
from .schedule import align

CHUNK_BYTES, CHUNKS = 8 * MIB, 4
"""The ring. A copy of 8 MiB takes the bus at its full rate; while one chunk is on its way the next ones are filled."""
RING_BYTES = CHUNK_BYTES * CHUNKS

_SLAB_BYTES = 128 * MIB
"""Bytes that are pinned at once. Pinning many small pieces is slow; a large one holds its contents twice while it is
filled."""


_copied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensors whose contents are copies of a part of a mapped file."""


class HostWeights:
    """The host memory of a model's tensors while they are not on the device.

    It stays within the budget of the :func:`host_budget` block in which it was made, later tensors too.

    Attributes:
        pinned_bytes: pinned memory of host weights.
        ring_bytes: pinned memory of the ring through which unpinned weights pass; 0 if all are pinned.
        held_bytes: ordinary memory of host weights that existed before and stay.
        mapped_bytes: host weights that stay in a mapped file.
        disk_bytes: the part of ``mapped_bytes`` that exceeds the budget and is read from the disk at every copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned_bytes = self.ring_bytes = self.held_bytes = self.mapped_bytes = self.disk_bytes = 0
        self._budget = _budget.get()
        self._past: PastCache | None = None
        self._on_disk: list[tuple[int, int]] = []
        self._cached_bytes = 0
        self._ring: _Ring | None = None
        self._mapped: set[int] = set()
        self._each: list[_HostTensor] = []
        self._known: dict[int, tuple[Tensor, _Place]] = {}

    @property
    def host_bytes(self) -> int:
        """Memory that cannot be dropped: all but the mapped files."""
        return self.pinned_bytes + self.ring_bytes + self.held_bytes

    @property
    def all_pinned(self) -> bool:
        """True if every host weight is pinned."""
        return not self.held_bytes and not self.mapped_bytes

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Settle new tensors in host memory, and those that hold other memory than before.

        Tensors that are left out are no longer known. They hold their host memory while they exist, until :meth:`undo`;
        the memory of those that do not exist any longer, as of an unloaded LoRA, is free for others.

        New tensors use what is left of the run's budget (:func:`host_budget`), without a budget all that may be pinned.
        Ordinary memory that tensors hold already is counted, and stays even if it exceeds the budget.

        Args:
            tensors: parameters and buffers, which stay the same objects, in the order in which they should be pinned.
        """
        present = {id(tensor): tensor for tensor in tensors}
        retained = {key: self._known[key] for key in present if key in self._known}
        news = [t for key, t in present.items() if key not in retained or retained[key][1] != _place(t)]
        _warn_of_moved(tensor for tensor in news if id(tensor) in retained)
        self._known = retained
        self._free(news)
        self._count()
        if active_fake_mode(*news) is not None:
            for tensor in news:
                mark_host(tensor)
        elif news:
            settled = len(self._each)
            try:
                with torch.no_grad(), torch.inference_mode(False):
                    self._settle(news)
            except BaseException:
                self._put_back(settled)
                raise
        self._known |= {id(tensor): (tensor, _place(tensor)) for tensor in news}

    def _free(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of tensors that no longer exist, and of ``tensors``, which hold other memory now."""
        self._each = [each for each in self._each if each.tensor() is not None]
        coming = {id(tensor) for tensor in tensors}
        for each in self._each:
            if id(each.tensor()) in coming:
                each.memory = _HostMemory("ordinary", 0)

    def can_pin(self, tensors: Iterable[Tensor]) -> bool:
        """True if all of ``tensors`` can be pinned, including those that are settled already."""
        budget = self._budget
        capacity = pinnable_bytes() if budget is None else min(pinnable_bytes() - budget.parked, budget.left)
        return sum(tensor.nbytes for tensor in tensors) <= capacity + self.pinned_bytes + self.held_bytes

    def copy_to(self, source: Tensor, target: Tensor) -> None:
        """Copy what a tensor holds on the host into ``target`` on the device.

        The copy runs on the current stream and does not block, but for the time that the ring needs to be filled:
        record an event on the stream before ``target`` is read.

        Args:
            source: the contents of a host weight: ``tensor.data`` outside of the time in which it is lent.
            target: of the same shape and type, neither an inference tensor nor one that requires gradients.
        """
        if self._ring is not None and self._is_slow(source):
            with ordinary_mode():
                if pair := _sort_dims(source, target):
                    self._ring.copy(*pair, self._past if self._is_on_disk(source) else None)
                    return
        target.copy_(source, non_blocking=self.device.type == "cuda")

    def pass_ring(self, copies: Iterable[tuple[Tensor, Tensor]]) -> bool:
        """True if any of ``copies`` passes through the ring, which is as slow as reading its source."""
        return self._ring is not None and any(self._is_slow(source) for source, _ in copies)

    def reader(self) -> Executor:
        """Return the thread that fills the ring; it works in the order of requests."""
        assert self._ring is not None
        return self._ring.reader

    def undo(self) -> None:
        """Give the tensors back what they held, where it was; what was changed meanwhile keeps its new contents, and
        nothing stays pinned that was not."""
        self._ring = self._past = None
        self._put_back(0)
        self._known.clear()

    def _put_back(self, first: int) -> None:
        moved: dict[_Place, Tensor] = {}
        with torch.no_grad(), torch.inference_mode(False):
            while len(self._each) > first:
                self._each.pop().undo(moved)
                unlock_ended()  # pinned copies of weights that are restored are freed before the next are allocated
        self._count()

    def _count(self) -> None:
        """Sum up the memory of the host weights that exist; the budget gets back what others had."""
        of_kind: dict[str, list[_HostMemory]] = {"pinned": [], "ordinary": [], "mapped": []}
        for memory in {id(each.memory): each.memory for each in self._each}.values():
            of_kind[memory.kind].append(memory)
        mapped = of_kind["mapped"]
        before = self.pinned_bytes + self.held_bytes + self._cached_bytes
        self.pinned_bytes = sum({m.storage or id(m): m.nbytes for m in of_kind["pinned"]}.values())
        self.held_bytes = sum(memory.nbytes for memory in of_kind["ordinary"])
        self.mapped_bytes = sum(memory.nbytes for memory in mapped)
        self._cached_bytes = sum(memory.nbytes for memory in mapped if memory.cached)
        self._mapped = {memory.storage for memory in mapped}
        self._on_disk = sorted((m.start, m.start + m.nbytes) for m in mapped if m.on_disk)
        self.disk_bytes = sum(stop - start for start, stop in self._on_disk)
        if self._budget is not None:
            self._budget.left -= self.pinned_bytes + self.held_bytes + self._cached_bytes - before

    def _is_slow(self, source: Tensor) -> bool:
        """True if ``source`` has to pass through the ring."""
        if active_fake_mode(source) is not None:
            return False
        if self.device.type == "cuda":
            return source.device.type == "cpu" and not source.is_pinned()
        return storage_key(source) in self._mapped

    def _is_on_disk(self, source: Tensor) -> bool:
        """True if the source exceeds the RAM budget and is read from disk in each step."""
        at = bisect.bisect_right(self._on_disk, (source.data_ptr(), math.inf)) - 1
        return at >= 0 and source.data_ptr() < self._on_disk[at][1]

    def _leave_on_disk(self, waiting: Iterable[tuple[Tensor, _HostMemory]], mapping: MappedFiles) -> None:
        """Choose which mapped weights stay in the system's cache: the first ones within the budget, in order.

        The rest is read past the cache."""
        if self._budget is None or not can_read_past_cache():
            return
        capacity, left = self._budget.left, list[Tensor]()
        for data, memory in waiting:
            if data.nbytes <= capacity:
                capacity -= data.nbytes
                memory.cached = True
            else:
                memory.on_disk = True
                left.append(data)
        if left:
            self._past = PastCache(mapping)
            for data in left:
                self._past.let_go(data)

    def _settle(self, tensors: Sequence[Tensor]) -> None:
        mapping, waiting = MappedFiles(), list[tuple[Tensor, _HostMemory]]()
        tied = _tied(tensors, mapping)
        for each, copy in zip(tied, self._pinned_copies(tied, mapping), strict=True):
            memory = each.memory(copy)
            if memory.kind == "mapped":
                waiting.append((each.data, memory))
            self._hand_over(each, memory, each.data.to("cpu") if copy is None and each.kind == "device" else copy)
        self._count()
        self._leave_on_disk(waiting, mapping)
        self._count()
        beside = self.device.type == "cuda" and self.held_bytes and (self._budget is None or self._budget.left >= 0)
        if self.mapped_bytes or beside:
            self._ring, self.ring_bytes = _ring_of(self.device), RING_BYTES

    def _pinned_copies(self, tied: Sequence[_Tied], mapping: MappedFiles) -> Iterator[Tensor | None]:
        """Copy tied weights to pinned memory, in order, within the budget; None for those that are not copied."""
        on_gpu = self.device.type == "cuda"
        copied = ("mapped", "device", "ordinary") if on_gpu else ("mapped", "device")
        held: dict[str, int] = {}
        for each in tied:
            held[each.kind] = held.get(each.kind, 0) + each.nbytes
        most, pinnable, past = self._limits(held, mapping)
        slabs = _Slabs((each.nbytes for each in tied if each.kind in copied), pinnable, on_gpu)
        ordinary = held.get("ordinary", 0)
        for each in tied:
            copy = None
            freed = each.nbytes if each.kind == "ordinary" else 0
            if each.kind in copied:
                like, growth = copied_tensor(each.tensors[0], each.data), most - slabs.total - ordinary + freed
                copy = slabs.copy_of(each.data, like, growth, past if each.kind == "mapped" else None)
            if copy is not None:
                ordinary -= freed
            elif each.kind == "device":
                ordinary += each.nbytes
            yield copy

    def _limits(self, held: Mapping[str, int], mapping: MappedFiles) -> tuple[int, int, PastCache | None]:
        """Bytes that host weights may have, those that may be pinned, and a reader past the system's cache if the
        bytes ``held`` by kind exceed the first."""
        ring = RING_BYTES if self.device.type == "cuda" or "mapped" in held else 0
        if self._budget is None:
            pinnable = pinnable_bytes() - ring
            return pinnable, pinnable, None
        most = self._budget.left + RING_BYTES - ring
        short = can_read_past_cache() and sum(held.values()) > most and "mapped" in held
        return most, pinnable_bytes() - ring - self._budget.parked, PastCache(mapping) if short else None

    def _hand_over(self, tied: _Tied, memory: _HostMemory, copy: Tensor | None) -> None:
        """Record where tied weights are, and give them ``copy`` if there is one."""
        data = tied.data
        for tensor in tied.tensors:
            original = data if tied.kind == "mapped" else None
            self._each.append(_HostTensor(TensorWeakRef(tensor), memory, original, data.device, tied.kind == "pinned"))
            if copy is not None:
                set_data(tensor, copy)
                if tied.kind == "mapped":
                    _copied[tensor] = True
            mark_host(tensor.data)


@dataclass(eq=False)
class _HostMemory:
    """Memory of a host weight, and of those tied to it: its kind, and where it lies.

    A pinned copy has the ``nbytes`` of the whole slab in which it lies, which is freed with the last weight in it; the
    slab is its ``storage``. A mapped one is ``cached`` if the system's cache may hold it within the budget, ``on_disk``
    if it is read from the disk at every copy.
    """

    kind: str
    nbytes: int
    storage: int = 0
    start: int = 0
    cached: bool = False
    on_disk: bool = False


@dataclass(frozen=True)
class _Tied:
    """Tensors with one memory, and its kind: mapped, pinned, ordinary, or on the device."""

    tensors: list[Tensor]
    kind: str

    @property
    def data(self) -> Tensor:
        """Contents of each."""
        return self.tensors[0].data

    @property
    def nbytes(self) -> int:
        """Bytes of the contents."""
        return self.tensors[0].nbytes

    def memory(self, copy: Tensor | None) -> _HostMemory:
        """Return their memory once they hold the pinned ``copy``; None: as they are."""
        if copy is not None:
            return _HostMemory("pinned", copy.untyped_storage().nbytes(), storage_key(copy))
        if self.kind == "mapped":
            return _HostMemory("mapped", self.nbytes, storage_key(self.data), self.data.data_ptr())
        return _HostMemory("pinned" if self.kind == "pinned" else "ordinary", self.nbytes)


def _tied(tensors: Iterable[Tensor], mapping: MappedFiles) -> list[_Tied]:
    places: dict[_Place, list[Tensor]] = {}
    for tensor in tensors:
        places.setdefault(_place(tensor), []).append(tensor)
    return [_Tied(sharing, mapping.kind(sharing[0])) for sharing in places.values()]


def _warn_of_moved(tensors: Iterable[Tensor]) -> None:
    moved = {str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"}
    if moved:
        warnings.warn(
            f"weights that sd-lowvram streams were moved to {', '.join(sorted(moved))}: they go back to host "
            "memory; call restore() first to have them elsewhere",
            stacklevel=3,
        )


@dataclass
class _HostTensor:
    """A tensor with its host memory, and what it held before: the mapped file (None: memory), the device, and whether
    it was pinned. The tensor may end meanwhile, as that of a LoRA does when it is unloaded."""

    tensor: TensorWeakRef
    memory: _HostMemory
    original: Tensor | None
    device: torch.device
    pinned: bool

    def undo(self, moved: dict[_Place, Tensor]) -> None:
        """Give the tensor back what it held; tensors that are one memory, known by ``moved``, stay so."""
        tensor = self.tensor()
        if tensor is None:
            return
        data = tensor.data
        unmark_host(data)
        _copied.pop(tensor, None)
        if self.original is not None and same_bits(data, self.original.to(data.device)):
            set_data(tensor, self.original)
        elif data.device != self.device:
            set_data(tensor, data.to(self.device))
        elif not self.pinned and is_pinned(data):
            place = _place(tensor)
            moved[place] = moved[place] if place in moved else unpin(data)
            set_data(tensor, moved[place])


class _Slabs:
    """Pinned memory in large pieces, at most ``most`` bytes of it, for contents that come in the order of ``sizes``."""

    def __init__(self, sizes: Iterable[int], most: int, pinned: bool) -> None:
        self.total = 0
        self._coming = deque(map(align, sizes))
        self._most = most
        self._pinned = pinned
        self._left: Tensor | None = None

    def copy_of(self, data: Tensor, like: Tensor, growth: int, past: PastCache | None = None) -> Tensor | None:
        """A copy of ``data`` with the strides of ``like``; None if ``growth`` more bytes of pinned memory are not
        enough.

        Args:
            past: reads ``data`` from its file without filling the system's cache.
        """
        if self._left is None or not len(self._left):
            self._left = self._open_piece(min(growth, self._most - self.total))
        size = self._coming.popleft()
        if self._left is None:
            return None
        space, self._left = self._left[: data.nbytes], self._left[size:]
        order = dense_order(like)
        copy = space.view(data.dtype).view([data.shape[dim] for dim in order]).permute(inverse(order))
        pair = _sort_dims(data, copy) if past is not None else None
        return copy if past is not None and pair and past.read(*pair) else copy.copy_(data)

    def _open_piece(self, growth: int) -> Tensor | None:
        """A piece that the next contents fill."""
        size = 0
        for coming in self._coming:
            if size >= _SLAB_BYTES or whole_pages(size + coming) > growth:
                break
            size += coming
        if not size:
            return None
        piece = pinned_empty(size) if self._pinned else host_empty([size], torch.uint8, False)
        if piece is None:
            self._most = 0  # the next one would be refused as well
        else:
            self.total += whole_pages(size)
        return piece


class _Ring:
    """Pinned chunks through which bytes pass to the device, in order; a chunk is refilled once it has been copied.

    All host weights of a device share one ring, from all threads.

    Attributes:
        reader: a thread that fills chunks while the device computes.
    """

    def __init__(self, pinned: bool) -> None:
        pin = None if pinned else False
        self._lock = threading.Lock()
        self._chunks = [host_empty([CHUNK_BYTES], torch.uint8, pin) for _ in range(CHUNKS)]
        self._copied: list[torch.cuda.Event | None] = [None] * CHUNKS
        self._turn = 0
        self.reader = ThreadPoolExecutor(1, "sd-lowvram-reader")

    def copy(self, source: Tensor, target: Tensor, past: PastCache | None = None) -> None:
        """Copy what :func:`_sort_dims` gives.

        Args:
            past: reads ``source`` from its file.
        """
        with self._lock:
            for piece, place in _pieces(source, target):
                turn = self._turn
                self._turn = (turn + 1) % CHUNKS
                copied = self._copied[turn]
                if copied is not None:
                    copied.synchronize()
                chunk = self._chunks[turn][: place.nbytes].view(place.dtype).view(place.shape)
                if past is None or not past.read(piece, chunk):
                    chunk.copy_(piece)
                place.copy_(chunk, non_blocking=place.is_cuda)
                if place.is_cuda:
                    self._copied[turn] = torch.cuda.current_stream(place.device).record_event()


_rings: weakref.WeakValueDictionary[torch.device, _Ring] = weakref.WeakValueDictionary()


def _ring_of(device: torch.device) -> _Ring:
    ring = _rings.get(device)
    if ring is None:
        ring = _rings[device] = _Ring(device.type == "cuda")
    return ring


def tensors_in_files(tensors: Iterable[Tensor]) -> list[bool]:
    """Return the tensors that are parts of mapped files and need no memory of their own while they wait.

    Weights without contents (meta or fake) count as mapped, because loading a checkpoint maps it.
    """
    mapping = MappedFiles()
    return [
        tensor.device.type == "meta" or active_fake_mode(tensor) is not None or mapping.kind(tensor) == "mapped"
        for tensor in tensors
    ]


def bytes_in_files(tensors: Iterable[Tensor]) -> int:
    """Bytes of those of ``tensors`` for which :func:`tensors_in_files` holds."""
    tensors = list(tensors)
    return sum(tensor.nbytes for tensor, mapped in zip(tensors, tensors_in_files(tensors), strict=True) if mapped)


def bytes_also_in_files(tensors: Iterable[Tensor]) -> int:
    """Bytes as :func:`bytes_in_files`, plus files copied to host memory, which :meth:`HostWeights.undo` frees."""
    tensors = list(tensors)
    return bytes_in_files(tensors) + sum(tensor.nbytes for tensor in tensors if tensor in _copied)


def mapped_bytes(*modules: nn.Module) -> int:
    """Bytes of the weights of ``modules`` that lie in mapped files."""
    with pause_models(modules):
        return bytes_in_files(all_tensors(*modules))


@dataclass
class _Budget:
    """Host memory that is ``left`` for a run's host weights, after the ring and ``parked`` bytes of maps."""

    left: int
    parked: int


_budget: ContextVar[_Budget | None] = ContextVar("host budget", default=None)


@contextlib.contextmanager
def host_budget(ram_bytes: int, parked_bytes: int = 0) -> Iterator[None]:
    """Limit the host weights that are settled within the block, of all models together, to ``ram_bytes`` less
    ``parked_bytes`` for parked maps."""
    token = _budget.set(_Budget(ram_bytes - parked_bytes - RING_BYTES, parked_bytes))
    try:
        yield
    finally:
        _budget.reset(token)


def least_host_bytes(weights_bytes: int, mapped: int) -> int:
    """Host memory that host weights of so many bytes need, when ``mapped`` of them lie in files that are mapped."""
    return max(0, weights_bytes - mapped) + (RING_BYTES if mapped else 0)


_Place = tuple[object, ...]


def _place(tensor: Tensor) -> _Place:
    """A key that is equal for tensors with the same memory, shape and strides: tied weights."""
    data = tensor.data  # of one moment: another thread may lend it meanwhile
    return storage_key(data), data.storage_offset(), data.shape, data.stride(), data.dtype


def _sort_dims(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both tensors with dimensions sorted by the strides of ``target``, as flat bytes if ``source`` has the same order.

    None if ``target`` has gaps, or another type."""
    order = dense_order(target)
    source, target = source.permute(order), target.permute(order)
    if source.dtype != target.dtype or not target.is_contiguous():
        return None
    if not source.is_contiguous():
        return source, target
    return source.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8)


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both that a chunk of the ring holds; ``target`` is contiguous."""
    if target.nbytes <= CHUNK_BYTES:
        yield source, target
    elif len(target) == 1:
        yield from _pieces(source[0], target[0])
    else:
        rows = max(1, len(target) * CHUNK_BYTES // target.nbytes)
        for parts in zip(source.split(rows), target.split(rows), strict=True):
            yield from _pieces(*parts)
