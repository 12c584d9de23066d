"""The host's side of streamed weights: what waits there, how much memory that takes, and how it gets to the device.

A master is what a weight holds while it is not on the device. Copies that are to run beside the compute need pinned
memory, and pinned memory is memory for good: so masters are pinned up to a share of what there is and of the run's
budget. Beyond that a master stays where it is, which for a checkpoint that safetensors opened is the file itself, mapped
into memory and dropped from it at need; its bytes pass through a small pinned ring. Nothing is held twice: what gets a
pinned copy gives up its first one, unless that is the file.

On a CPU-only machine "pinned" memory is ordinary memory in the host's account, and everything else is the same.
Fidelity: ``bitwise``.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..device import host_memory
from ..memory import host_empty, mark_host
from ..memory.accounts import unmark_host
from ..memory.fakes import active_fake_mode
from ..sizes import MIB
from ..weights import all_tensors, set_data

PINNED_SHARE = 0.5
"""Of the host memory that this process may use: locked pages can be neither swapped nor dropped, and the system, the
file cache that feeds the ring, and other programs live in the rest."""

CHUNK_BYTES, CHUNKS = 8 * MIB, 4
"""The ring. A copy of 8 MiB takes the bus at its full rate; while one chunk is on its way the next ones are filled."""
RING_BYTES = CHUNK_BYTES * CHUNKS

_SLAB_BYTES = 128 * MIB
"""torch rounds each pinned allocation up to a power of two, so that tensors pinned one by one would waste a third."""
_ALIGNMENT = 512


class Masters:
    """Masters of some tensors; made by :func:`masters_of`.

    Attributes:
        pinned_bytes: memory taken for pinned masters.
        ring_bytes: of the ring in front of all others; 0 where there are none.
        held_bytes: ordinary memory of masters that were there before and stay.
        mapped_bytes: of masters that stay in a mapped file.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned_bytes = self.ring_bytes = self.held_bytes = self.mapped_bytes = 0
        self._ring: _Ring | None = None
        self._mapped: set[int] = set()
        self._settled: list[_Settled] = []

    @property
    def host_bytes(self) -> int:
        """Memory that cannot be dropped: all but the mapped files."""
        return self.pinned_bytes + self.ring_bytes + self.held_bytes

    def copy_to(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Copy what a tensor holds on the host into ``target`` on the device.

        Where both lie in memory alike, the copy runs on ``stream`` (None: the current one) and does not block, but for
        the time that the ring needs to be filled: record an event on the stream before ``target`` is read.

        Args:
            source: the contents of a master: ``tensor.data`` outside of the time in which it is lent.
            target: of the same shape and type.
        """
        with torch.no_grad(), torch.inference_mode(False):
            source = source.detach()
            if self._ring is not None and self._is_slow(source) and (pair := _in_bytes(source, target)):
                self._ring.copy(*pair, stream)
                return
            with _on(stream):
                target.copy_(source, non_blocking=target.is_cuda)

    def undo(self) -> None:
        """Give the tensors back what they held, where it was; what was changed meanwhile keeps its new contents."""
        with torch.inference_mode(False):
            while self._settled:
                self._settled.pop().undo()
        self._ring = None
        self._mapped.clear()

    def _is_slow(self, source: Tensor) -> bool:
        """Whether ``source`` has to pass the ring."""
        if active_fake_mode(source) is not None:
            return False
        if self.device.type == "cuda":
            return source.device.type == "cpu" and not source.is_pinned()
        return source.untyped_storage()._cdata in self._mapped


def masters_of(tensors: Iterable[Tensor], ram_bytes: int | None, device: torch.device | str) -> Masters:
    """Settle ``tensors`` in host memory, so that :meth:`Masters.copy_to` can bring them to ``device`` again and again.

    Args:
        tensors: parameters and buffers, those first whose copies should be pinned first. They stay the same objects.
        ram_bytes: of host memory that masters may take. None: the budget of the run (:func:`host_budget`). Ordinary
            memory that tensors hold already is counted, and kept even when it is more than this.
        device: to which they will be copied.
    """
    masters = Masters(torch.device(device))
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    if active_fake_mode(*unique) is not None:
        for tensor in unique:
            masters._settled.append(_Settled(tensor, tensor.data))
            mark_host(tensor.data)
        return masters
    try:
        with torch.no_grad(), torch.inference_mode(False):
            _settle(masters, unique, budget() if ram_bytes is None else ram_bytes)
    except BaseException:
        masters.undo()
        raise
    return masters


def _settle(masters: Masters, tensors: Sequence[Tensor], ram_bytes: int) -> None:
    mapping = _Mapping()
    on_gpu = masters.device.type == "cuda"
    kinds = [mapping.holds(tensor.data) for tensor in tensors]
    sizes = [_nbytes(tensor) for tensor in tensors]
    present = sum(size for size, mapped in zip(sizes, kinds, strict=True) if not mapped)
    ring = RING_BYTES if any(kinds) or on_gpu else 0
    slabs = _Slabs(int(PINNED_SHARE * host_memory().total) - ring)
    room = ram_bytes - ring - present
    copies: dict[tuple[object, ...], Tensor] = {}
    for tensor, mapped, size in zip(tensors, kinds, sizes, strict=True):
        data, key = tensor.data, _place(tensor)
        ordinary = data.device.type == "cpu" and not mapped
        settled = _Settled(tensor, data)
        master = copies.get(key)
        if master is None and not (ordinary and (data.is_pinned() or not on_gpu)):
            # ordinary memory is given up for the copy, a file is not
            before = slabs.total
            master = slabs.copy_of(data, room + (0 if mapped else size))
            room -= slabs.total - before - (0 if mapped or master is None else size)
        if master is None and data.device.type != "cpu":
            master = data.to("cpu")
        if master is not None:
            copies[key] = master
            settled.original = data if mapped else None
            set_data(tensor, master)
        elif mapped:
            masters._mapped.add(data.untyped_storage()._cdata)
            masters.mapped_bytes += size
        mark_host(tensor.data)
        masters._settled.append(settled)
        if not mapped and (master is None or slabs.total == 0):
            masters.held_bytes += size
    masters.pinned_bytes = slabs.total
    if masters.mapped_bytes or on_gpu:
        masters._ring, masters.ring_bytes = _Ring(masters.device), RING_BYTES
