"""Mapped weights: their place in the file, and reading them without filling the system's cache.

The system caches what is read from files and drops what was read longest ago. Weights that are read one after the other
and exceed the cache are dropped just before they are needed again, so that every byte is read from disk in every step.
Therefore a fixed part stays cached, and the rest is read directly: its pages are freed at once and displace nothing.
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
"""Bytes per page in /proc/self/pagemap: bit 63, in memory; bit 62, swapped out; bit 61, page of a file."""


@dataclass(frozen=True)
class _Span:
    """Addresses that show a part of a file: ``end`` is the first behind them, ``offset`` of the first in the file."""

    start: int
    end: int
    offset: int
    node: int
    file: str


class MappedFiles:
    """Addresses of this process that belong to mapped files; empty on systems that do not report them."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                span, _, offset, _, node, *file = line.split(maxsplit=5)
                if node != "0" and file and not file[0].startswith(("/dev/", "/memfd:", "/SYSV")):
                    start, end = (int(bound, 16) for bound in span.split("-"))
                    self._spans.append(_Span(start, end, int(offset, 16), int(node), file[0]))
        self._starts = [span.start for span in self._spans]

    def span(self, address: int) -> _Span | None:
        """The part of a file that is mapped at ``address``."""
        index = bisect.bisect_right(self._starts, address) - 1
        return self._spans[index] if index >= 0 and address < self._spans[index].end else None

    def file(self, tensor: Tensor) -> str | None:
        """The file that ``tensor`` is a part of."""
        span = self.span(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        return span.file if span else None

    def kind(self, tensor: Tensor) -> Literal["device", "pinned", "mapped", "ordinary"]:
        """The kind of memory of ``tensor``."""
        if tensor.device.type != "cpu":
            return "device"
        if self.span(tensor.data_ptr()) is not None:
            return "mapped"
        return "pinned" if torch.cuda.is_available() and tensor.is_pinned() else "ordinary"


def can_read_past_cache() -> bool:
    """True if the system can drop cached pages, and reports which pages of a mapped file were written to."""
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
        """Read ``source`` from its mapped file into memory.

        Return False, with nothing read, if ``source`` is not contiguous, or if its pages were written to and no longer
        equal the file; the caller then copies it.

        Args:
            source: a weight in a mapped file.
            into: memory of as many bytes.

        Returns:
            True if it was read. False, with nothing read, if ``source`` is not contiguous, or its pages were written to
            and no longer equal the file; the caller then copies it.
        """
        if source.dtype != torch.uint8 or source.dim() != 1 or not source.is_contiguous():
            return False
        start, size = source.data_ptr(), source.nbytes
        span = self._mapped.span(start)
        if span is None or start + size > span.end or self._is_written(start, size):
            return False
        file = self._file(span)
        if file is None:
            return False
        offset, block = (
            span.offset + start - span.start,
            memoryview((ctypes.c_char * size).from_address(into.data_ptr())).cast("B"),
        )
        done = 0
        while done < size:
            read = os.preadv(file, [block[done:size]], offset + done)
            if not read:  # the file was cut short since
                return False
            done += read
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE  # the last page stays for the read that goes on in it
        os.posix_fadvise(file, first, offset + size - first, os.POSIX_FADV_DONTNEED)
        return True

    def let_go(self, source: Tensor) -> None:
        """Drop the pages of ``source`` from memory. Pages that were written to stay, and older systems keep all."""
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
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        opened = self._open[span.file]
        return opened if opened is not None and os.fstat(opened).st_ino == span.node else None

    def _is_written(self, start: int, size: int) -> bool:
        first, last = start // mmap.PAGESIZE, (start + size - 1) // mmap.PAGESIZE
        entries = os.pread(self._pages, (last - first + 1) * _ENTRY, first * _ENTRY)
        if len(entries) != (last - first + 1) * _ENTRY:
            return True
        here = torch.frombuffer(bytearray(entries), dtype=torch.int64) >> 61 & 0b111
        return bool(((here & 0b110 != 0) & (here & 0b001 == 0)).any())
