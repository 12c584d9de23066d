"""Parking: the only way in which activations go to host memory and come back, bit for bit.

On CUDA the host side is pinned, and copies run on the current stream without blocking the host; events order them if
the caller changes streams. :func:`send` copies on a stream of its own, while the compute continues. On a CPU-only
machine the device is RAM too, and parking still copies: a parked tensor shares no memory with its source or its fetched
copy.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..weights import is_channels_last
from .accounts import actual_device, device_account, host_account, mark_host, weights_account
from .fake_mode import active_fake_mode
from .pinned import can_pin, pinned_empty
from .pinned_buffers import PINNED_BUFFERS, PinnedBuffer, PinnedBuffers, PinnedPair


def host_empty(shape: Sequence[int], dtype: torch.dtype, pin: bool | None = None) -> Tensor:
    """Allocate an uninitialised tensor in host memory, in the host's account.

    Args:
        shape, dtype: of the tensor, which is contiguous.
        pin: True to page-lock it, so that copies to CUDA need not block. None: if CUDA is present (not ROCm, which is
            known to stall with pinned memory). If locking fails the memory is pageable: slower, and equally right.
    """
    pinned = None
    if active_fake_mode() is None and (can_pin() if pin is None else pin):
        pinned = pinned_empty(_nbytes(shape, dtype))
    if pinned is not None:
        empty = _view_as(pinned, shape, dtype)
    else:
        with host_account():
            empty = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    mark_host(empty)
    return empty


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _view_as(bytes: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Bytes as a tensor of a type."""
    return bytes.view(dtype).view(tuple(shape))


def to_device(tensor: Tensor, device: torch.device | str, *, weight: bool = False) -> Tensor:
    """Copy ``tensor`` to ``device``, in the device's account; the copy is real even if both are the CPU.

    Strides are preserved if the tensor is dense. The copy does not block if ``tensor`` is pinned: leave ``tensor``
    unchanged until the current stream has passed the copy.

    Args:
        tensor: in host memory.
        device: where to.
        weight: True for a streamed weight, False for an activation.

    Returns:
        The copy.
    """
    with weights_account() if weight else device_account():
        copy = torch.empty_like(tensor, device=actual_device(device), requires_grad=False)
        return copy.copy_(tensor.detach(), non_blocking=_is_unblocked(tensor, copy))


def to_host(tensor: Tensor, pin: bool | None = None) -> Tensor:
    """Copy ``tensor`` to host memory, in the host's account; the copy is complete on return.

    Args:
        tensor: on any device; dense strides are preserved.
        pin: as for :func:`host_empty`.
    """
    order = dense_order(tensor)
    copy = host_empty([tensor.shape[dim] for dim in order], tensor.dtype, pin).permute(inverse(order))
    return copy.copy_(tensor.detach())


def is_pinned(tensor: Tensor) -> bool:
    """True if the memory of ``tensor`` is page-locked host memory."""
    return tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()


def unpin(data: Tensor) -> Tensor:
    """``data`` itself, or a copy in ordinary memory if ``data`` is page-locked; strides are preserved if dense."""
    return torch.empty_like(data, pin_memory=False).copy_(data) if is_pinned(data) else data


def _is_unblocked(host: Tensor, device: Tensor) -> bool:
    return device.device.type == "cuda" and host.device.type == "cpu" and host.is_pinned()


@contextlib.contextmanager
def parking_in_pairs(nbytes: int, device: torch.device) -> Iterator[PinnedBuffers | PinnedPair]:
    """Pinned memory, locked once, for maps of which two at a time are parked within the block.

    Args:
        nbytes: the most that two such maps take.
        device: device of the maps.
    """
    if nbytes == 0 or device.type != "cuda" or not can_pin() or active_fake_mode() is not None:
        yield PINNED_BUFFERS
        return
    pair = PinnedPair(PINNED_BUFFERS, nbytes)
    try:
        yield pair
    finally:
        pair.close(device)


class Parked:
    """A tensor waiting in host memory, whole (``park``) or written and read by rows (``Parked.empty``).

    Attributes:
        shape, dtype: of the tensor that is parked.
        device: where it is fetched to.
        nbytes: host memory that it takes.
    """

    _buffer: PinnedBuffer | None = None

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        order: Sequence[int],
        device: torch.device,
        memory_format: torch.memory_format = torch.preserve_format,
        buffers: PinnedBuffers | PinnedPair = PINNED_BUFFERS,
    ) -> None:
        """Allocate host memory for a tensor of ``shape`` whose dimensions are stored in ``order``, the outermost first.

        Args:
            shape, dtype: of the tensor.
            order: its dimensions in host memory, the outermost first.
            device: device that the tensor is fetched to.
            memory_format: of the fetched tensor.
            buffers: give the pinned memory, if the device copies from such memory.
        """
        self._buffers = buffers
        on_host = [shape[dim] for dim in order]
        if device.type == "cuda" and can_pin() and active_fake_mode() is None:
            self._buffer = buffers.take(_nbytes(on_host, dtype))
        buffer = self._buffer
        self._host = host_empty(on_host, dtype, False) if buffer is None else _view_as(buffer.bytes, on_host, dtype)
        mark_host(self._host)
        self._event: torch.cuda.Event | None = None if buffer is None else buffer.copied
        self._order = tuple(order)
        self._format = memory_format
        self._leaving: Tensor | None = None
        self.device = device
        self.dtype = dtype
        self.shape = torch.Size(shape)
        self.nbytes = self._host.nbytes

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffers.leave(self._buffer, self._event)

    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        *,
        like: Tensor | None = None,
        buffers: PinnedBuffers | PinnedPair = PINNED_BUFFERS,
    ) -> Parked:
        """Allocate host memory for a map (N, C, H, W) that is stored and loaded by rows (dimension 2).

        Rows are outermost in host memory, so that a strip is one contiguous copy. On the device a strip needs one more
        buffer of its own size, unless N is 1 and its memory format is channels last.

        Args:
            shape, dtype: of the map.
            device: device of the strips; None: the device of ``like``, else the CPU.
            like: a tensor with the memory format of the strips (contiguous, or channels last).
        """
        if len(shape) != 4:
            raise ValueError(f"a map to park by rows has the shape (N, C, H, W), not {tuple(shape)}")
        wanted = torch.device(device) if device is not None else like.device if like is not None else "cpu"
        channels_last = like is not None and is_channels_last(like)
        order = (2, 0, 3, 1) if channels_last else (2, 0, 1, 3)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return cls(shape, dtype, order, actual_device(wanted), memory_format, buffers)

    def store(self, rows: slice, strip: Tensor) -> None:
        """Copy ``strip`` (N, C, rows, W) into these rows of the map.

        Args:
            rows: rows of the map, along H.
            strip: their contents.

        Raises:
            ValueError: the strip's shape or type is not that of the rows.
        """
        where = self._rows_on_host(rows)
        staged = strip.detach().permute(self._order)
        if staged.shape != where.shape or staged.dtype != where.dtype:
            raise ValueError(
                f"a strip of {tuple(strip.shape)} {strip.dtype} does not fill rows {rows.start}:{rows.stop} "
                f"of {tuple(self.shape)} {self.dtype}"
            )
        with self._order_copies(strip.device), device_account():
            where.copy_(staged.contiguous(), non_blocking=_is_unblocked(self._host, strip))

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the values to another type of as many bytes, in the same memory."""
        self._wait()
        self._host = reinterpret(self._host, dtype, self._order.index(2))
        self.dtype = dtype

    def load(self, rows: slice | None = None, device: torch.device | str | None = None) -> Tensor:
        """Return rows of the map as a new tensor on the device, in their original memory format.

        Args:
            rows: rows along H; None: all.
            device: None: the original device.
        """
        _let_go()
        source = self._host if rows is None else self._rows_on_host(rows)
        place = self.device if device is None else actual_device(device)
        if place.type == "cuda" and not source.is_contiguous():  # the host puts its pieces together
            self._wait()
        with self._order_copies(place), device_account():
            staged = torch.empty(source.shape, dtype=self.dtype, device=place)
            staged.copy_(source, non_blocking=_is_unblocked(self._host, staged))
            loaded = staged.permute(inverse(self._order))
            return loaded if self._format is torch.preserve_format else loaded.contiguous(memory_format=self._format)

    @property
    def is_there(self) -> bool:
        """True if :meth:`recall` needs no copy."""
        return self._leaving is not None

    def recall(self) -> Tensor:
        """Return the parked contents for reading: the tensor that was sent while it still exists, else a new one."""
        tensor, self._leaving = self._leaving, None
        return self.load() if tensor is None else tensor

    def _rows_on_host(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(self.shape[2])
        if step != 1 or (rows.stop is not None and rows.stop > self.shape[2]) or stop <= start:
            raise ValueError(f"rows {rows.start}:{rows.stop} are not among the {self.shape[2]} rows of this map")
        return self._host.narrow(self._order.index(2), start, stop - start)

    def _wait(self) -> None:
        """Wait for the last copy of this map."""
        if self._event is not None:
            self._event.synchronize()

    @contextlib.contextmanager
    def _order_copies(self, device: torch.device) -> Iterator[None]:
        """Copies inside wait for the last one of this map, on whichever stream it ran."""
        if device.type != "cuda":  # the host reads and writes at once
            self._wait()
            yield
            return
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self._event is not None:
                stream.wait_event(self._event)
            yield
            self._event = torch.cuda.Event()
            self._event.record(stream)


def reinterpret(data: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """Convert ``data`` to another type of as many bytes, in the same memory, row by row.

    Args:
        data: any tensor.
        dtype: the new type.
        dim: dimension of the rows.
    """
    converted = data.view(dtype)
    for row in range(data.shape[dim]):
        converted.select(dim, row).copy_(data.select(dim, row).to(dtype))
    return converted


def dense_order(tensor: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost; the plain order if memory has gaps."""
    shape, strides = tensor.shape, tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    inner = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != inner:
            return list(range(tensor.dim()))
        inner *= shape[dim]
    return order


def dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the tensor, or of its contiguous copy if it has gaps."""
    strides, step = [0] * tensor.dim(), 1
    for dim in reversed(dense_order(tensor)):
        strides[dim] = step
        step *= tensor.shape[dim]
    return strides


def inverse(order: Sequence[int]) -> list[int]:
    """Inverse of a permutation."""
    return [order.index(dim) for dim in range(len(order))]


def park(tensor: Tensor) -> Parked:
    """Copy ``tensor`` (any shape) into host memory; drop it afterwards to free the device. Fidelity: ``bitwise``.

    On CUDA the copy runs on the current stream: overwrite or free ``tensor`` in the order of that stream.
    """
    order = dense_order(tensor)
    parked = Parked(tensor.shape, tensor.dtype, order, tensor.device)
    with parked._order_copies(tensor.device), device_account():
        source = tensor.detach().permute(order).contiguous()
        parked._host.copy_(source, non_blocking=_is_unblocked(parked._host, tensor))
    return parked


def send(tensor: Tensor) -> Parked:
    """Park a tensor that the caller drops and no code changes any more; on CUDA the copy overlaps with compute.

    The tensor stays on the device until the next one is sent or fetched, so that at most one copy is in flight; until
    then ``recall`` returns it without a copy. When the tensor is dropped, the compute waits for the copy, because its
    memory is then reused. Fidelity: ``bitwise``.
    """
    _let_go()
    if tensor.nbytes < tensor.untyped_storage().nbytes():  # keeping a view would keep the whole storage
        return park(tensor)
    with _use_parking_stream(tensor):
        parked = park(tensor)
    if parked._event is not None:
        _wait_when_dropped(tensor, torch.cuda.current_stream(tensor.device), parked._event)
    parked._leaving = tensor
    _sent.last = weakref.ref(parked)
    return parked


@contextlib.contextmanager
def _use_parking_stream(tensor: Tensor) -> Iterator[None]:
    """Copies of ``tensor`` inside run as soon as it has been computed, and nothing waits for them."""
    if not tensor.is_cuda:
        yield
        return
    beside = _parking_stream(tensor.device)
    beside.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(beside):
        yield


def _wait_when_dropped(tensor: Tensor, compute: torch.cuda.Stream, copied: torch.cuda.Event) -> None:
    """The memory of ``tensor`` goes to whatever is computed next: that waits for the copy."""
    weakref.finalize(tensor, compute.wait_event, copied).atexit = False


class _Sent(threading.local):
    """The tensor that each thread has sent last."""

    last: weakref.ref[Parked] | None = None


_sent = _Sent()


def _let_go() -> None:
    """Drop the tensor that was sent last, if nobody has called it back."""
    parked = None if _sent.last is None else _sent.last()
    _sent.last = None
    if parked is not None:
        parked._leaving = None


@functools.cache
def _parking_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def fetch(parked: Parked, rows: slice | None = None, device: torch.device | str | None = None) -> Tensor:
    """Return the parked contents as a new tensor on ``device`` (None: its original device), strides preserved if dense.

    Args:
        rows: return only these rows of a map (N, C, H, W). A map from ``park`` is cut on the host, which is slow on
            CUDA; create it with ``Parked.empty`` if it is read by rows often.
    """
    return parked.load(rows, device)
