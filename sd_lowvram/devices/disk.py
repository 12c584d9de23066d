"""Read rate of a disk without cache: by name, stated, or measured. torch is not imported here."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ..cache import cache_folder, recall, remember
from ..errors import BadInputError
from ..units import MIB

DISKS = {"nvme": 3.0e9, "sata": 0.5e9, "hdd": 0.15e9}
"""Bytes a second of an NVMe drive on PCIe 3.0 x4, of what SATA lets through, and of a disk that turns."""
ASSUMED = DISKS["nvme"]
"""Rate if no disk is stated and none can be measured."""

_READ, _CHUNK, _LEAST = 128 * MIB, 8 * MIB, 64 * MIB
_SECONDS = 1.0
_IO = Path("/proc/self/io")


def parse_disk(text: str, what: str = "--disk") -> float:
    """Bytes a second of a disk that is named, or stated in MB/s: "sata", "550".

    Args:
        text: a named disk ("sata"), or MB/s ("550").
        what: name of the option, for the error.

    Raises:
        BadInputError: it is neither.
    """
    rate = DISKS.get(text.strip().lower())
    if rate is None:
        with contextlib.suppress(ValueError):
            rate = 1e6 * float(text)
    if rate is None or not 1e6 <= rate <= 1e12:
        raise BadInputError(f"{what} {text!r}: give {', '.join(DISKS)}, or a number of MB/s from 1 to 1000000")
    return rate


def describe_rate(rate: float) -> str:
    """A disk by its bytes a second, for people."""
    named = {"nvme": "NVMe", "sata": "SATA", "hdd": "a hard disk"}
    plain = f"{rate / 1e9:.2g} GB/s"
    return next((f"{named[name]} ({plain})" for name, disk in DISKS.items() if disk == rate), f"a disk of {plain}")


def disk_rate(path: Path, again: bool = False) -> float | None:
    """Bytes a second of the disk under ``path``, measured once in a second, and cached.

    None if the system does not report reads past its cache, or none came from a disk.

    Args:
        path: a file or folder on the disk.
        again: measure again, even if a rate is cached.
    """
    try:
        device = path.stat().st_dev
    except OSError:
        return None
    folder = cache_folder()
    where = folder / f"disk-{device:x}.json" if folder else None
    rate = None if again else recall(where)
    if not isinstance(rate, float):
        rate = measured_rate(path)
        if rate is not None:
            remember(where, rate)
    return rate


def measured_rate(path: Path) -> float | None:
    """Measure :func:`disk_rate` now, in a large file at ``path`` or in its folders.

    If there is none, a file of 64 MiB is written there and removed."""
    if not hasattr(os, "O_DIRECT"):
        return None
    with contextlib.suppress(OSError):
        largest = max(_files(path), key=lambda file: file.stat().st_size, default=None)
        if largest is not None and largest.stat().st_size >= _LEAST:
            return _read(largest)
        with tempfile.NamedTemporaryFile(dir=path if path.is_dir() else path.parent) as file:
            file.write(os.urandom(_LEAST))
            file.flush()
            os.fsync(file.fileno())
            return _read(Path(file.name))
    return None


def _files(path: Path) -> Iterator[Path]:
    """``path`` itself, or the files of a model's folder."""
    if path.is_file():
        yield path
    else:
        for pattern in ("*.*", "*/*.*"):
            yield from (file for file in path.glob(pattern) if file.suffix in (".safetensors", ".gguf", ".bin"))


def _read(file: Path) -> float | None:
    """The rate of chunks that lie evenly in ``file``, read past the cache; None where no disk was read.

    Raises:
        OSError: the file system reads nothing past its cache.
    """
    opened = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(opened).st_size // _CHUNK * _CHUNK
        count = min(size, _READ) // _CHUNK
        with mmap.mmap(-1, _CHUNK) as room:  # whole pages, as reads past the cache ask for
            before, start, read = _bytes_read(), time.perf_counter(), 0
            for number in range(count):
                read += os.preadv(opened, [room], number * (size // count) // _CHUNK * _CHUNK)
                if time.perf_counter() - start > _SECONDS:
                    break
            seconds = time.perf_counter() - start
        return read / seconds if _bytes_read() - before >= read // 2 > 0 else None
    finally:
        os.close(opened)


def _bytes_read() -> int:
    """Bytes that this process has had read from disks so far.

    Raises:
        OSError: the system does not report it.
    """
    counters = dict(line.split(": ") for line in _IO.read_text(encoding="utf-8").splitlines())
    return int(counters["read_bytes"])
