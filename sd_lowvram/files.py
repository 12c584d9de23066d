"""Files that are there whole or not at all, whatever ends the program or the machine; version and Markdown tables."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
"""The version, which files and machines are compared by."""

_BEGIN, _END = ".sd-lowvram-", ".part"
"""Beginning and end of the names of temporary files."""


def sweep(folder: Path) -> None:
    """Remove the temporary files that programs have left in ``folder`` which were killed; none may be at work there."""
    for left in folder.glob(f"{_BEGIN}*{_END}"):
        with contextlib.suppress(OSError):
            left.unlink()


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[tuple[Any, Path]]:
    """Yield a new open file in the folder of ``path``, and its name; delete it at the end unless renamed."""
    handle, name = tempfile.mkstemp(prefix=_BEGIN, suffix=_END, dir=path.parent)  # a name of its own may be too long
    file = os.fdopen(handle, "wb")
    try:
        yield file, Path(name)
    finally:
        # A full disk fails once more when the buffer is flushed on closing.
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def write_whole(data: bytes, path: Path) -> None:
    """Write ``data`` to ``path`` atomically: a crash or power cut leaves the old contents or the new."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file; rename it to ``path`` on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as (file, temporary):
        yield temporary
        os.fsync(file.fileno())
        # mkstemp lets only the owner read; this file gets what any new one gets.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        if os.name == "nt":
            file.close()
        os.replace(temporary, path)
    if os.name != "nt":
        _keep_name(path.parent)


def _keep_name(folder: Path) -> None:
    """Sync the names in ``folder`` to disk, if its file system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(value: Any, path: Path) -> None:
    """Write plain values as JSON, like :func:`write_whole`."""
    write_whole(json.dumps(value, indent=1).encode() + b"\n", path)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    yield from (f"| {' | '.join(row)} |" for row in rows)
