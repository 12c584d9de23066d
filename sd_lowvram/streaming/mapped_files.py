"""Where in which file a weight lies that a checkpoint has mapped, and how to read it without keeping it in memory.

The system caches what is read from files, and forgets what was read longest ago. Weights that are read in turn, and
are more than it can hold, are so forgotten just before they are needed again: every byte comes from the disk in every
step. It is therefore decided beforehand what stays cached, and all else is read past the cache: straight from the
file, whose pages are given up at once and displace nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

_PAGEMAP = Path("/proc/self/pagemap")
_PAGE_OUT = 21
"""MADV_PAGEOUT, since Linux 5.4."""
_ENTRY = 8
"""Bytes that the system tells of each page: bit 63, it is in memory; 62, swapped out; 61, it is a file's."""


@dataclass(frozen=True)
class _Span:
    """Addresses that show a part of a file: ``end`` is the first behind them, ``offset`` of the first in the file."""

    start: int
    end: int
    offset: int
    node: int
    file: str


class MappedFiles:
    """Which addresses of this process belong to mapped files. Where the system does not tell, none seem to."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                span, _, offset, _, node, *file = line.split(maxsplit=5)
                if node != "0" and file and not file[0].startswith(("/dev/", "/memfd:", "/SYSV")):
                    start, end = (int(one, 16) for one in span.split("-"))
                    self._spans.append(_Span(start, end, int(offset, 16), int(node), file[0]))
        self._starts = [span.start for span in self._spans]

    def span(self, address: int) -> _Span | None:
        """The part of a file that is mapped at ``address``."""
        found = bisect.bisect_right(self._starts, address) - 1
        return self._spans[found] if found >= 0 and address < self._spans[found].end else None

    def file(self, tensor: Tensor) -> str | None:
        """The file in which ``tensor`` lies."""
        span = self.span(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        return span.file if span else None

    def kind(self, tensor: Tensor) -> Literal["device", "pinned", "mapped", "ordinary"]:
        """What memory ``tensor`` lies in."""
        if tensor.device.type != "cpu":
            return "device"
        if self.span(tensor.data_ptr()) is not None:
            return "mapped"
        return "pinned" if torch.cuda.is_available() and tensor.is_pinned() else "ordinary"


def can_read_past_cache() -> bool:
    """Whether the system lets go of cached pages of files, and tells which pages of a mapped file were written to."""
    return hasattr(os, "posix_fadvise") and hasattr(os, "preadv") and os.access(_PAGEMAP, os.R_OK)


class PastCache:
    """Reads bytes of mapped weights from their files, without leaving them in the system's cache."""

    def __init__(self, mapped: MappedFiles) -> None:
        self._mapped = mapped
        self._open: dict[str, int | None] = {}
        self._pages = os.open(_PAGEMAP, os.O_RDONLY)

    def __del__(self) -> None:
        for file in (self._pages, *self._open.values()):
            if file is not None:
                os.close(file)

    def read(self, source: Tensor, into: Tensor) -> bool:
        """Read what ``source`` shows of a mapped file into memory; False: nothing was read, and it is for the caller to
        copy, as it is no row of bytes, or somebody has written into its pages, which are not the file's any more."""
        if source.dtype != torch.uint8 or source.dim() != 1 or not source.is_contiguous():
            return False
        start, size = source.data_ptr(), source.nbytes
        span = self._mapped.span(start)
        if span is None or start + size > span.end or self._is_written(start, size):
            return False
        file = self._file(span)
        if file is None:
            return False
        offset, room = (
            span.offset + start - span.start,
            memoryview((ctypes.c_char * size).from_address(into.data_ptr())).cast("B"),
        )
        done = 0
        while done < size:
            read = os.preadv(file, [room[done:size]], offset + done)
            if not read:  # the file was cut short since
                return False
            done += read
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE  # the last page is left to who reads on in it
        os.posix_fadvise(file, first, offset + size - first, os.POSIX_FADV_DONTNEED)
        return True

    def let_go(self, source: Tensor) -> None:
        """Take ``source`` out of memory, as far as loading it has brought it there: what a process sees of a file the
        system keeps cached. What somebody has written is kept, and an older system keeps all."""
        first = source.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = source.data_ptr() + source.nbytes - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _PAGE_OUT)

    def _file(self, span: _Span) -> int | None:
        """The mapped file, opened; None where another one has its name by now."""
        if span.file not in self._open:
            self._open[span.file] = None
            with contextlib.suppress(OSError):
                file = os.open(span.file, os.O_RDONLY)
                self._open[span.file] = file
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read that was not asked for
        opened = self._open[span.file]
        return opened if opened is not None and os.fstat(opened).st_ino == span.node else None

    def _is_written(self, start: int, size: int) -> bool:
        first, last = start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE
        told = os.pread(self._pages, (last - first + 1) * _ENTRY, first * _ENTRY)
        if len(told) != (last - first + 1) * _ENTRY:
            return True
        here = torch.frombuffer(bytearray(told), dtype=torch.int64) >> 61 & 0b111
        return bool(((here & 0b110 != 0) & (here & 0b001 == 0)).any())
