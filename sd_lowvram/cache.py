"""Files of the cache, which only this user writes, and until when they hold: torch is not imported here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "diffusers", "transformers", "peft")
"""Packages whose code a model is made of."""

_KERNELS = ("triton", "triton-windows", "pytorch-triton", "xformers")
"""Packages with kernels that a plan for the GPU at hand takes where they are installed."""

CODE = ("traced", "compiled")
"""Kinds whose files are run."""

MOST_BYTES = 64 << 20
"""Most bytes of a file of ours."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"))
"""Flags with which open refuses links, and does not wait for the writer of a pipe."""


def cache_folder() -> Path | None:
    """Return the folder of everything cached: SD_LOWVRAM_CACHE, or one in the user's cache folder.

    None: the variable is empty, there is no home folder, or the folder belongs to another user.
    """
    named = os.environ.get("SD_LOWVRAM_CACHE")
    if named is not None:
        return private(Path(os.path.expanduser(named))) if named else None
    base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME")
    try:
        return private((Path(base) if base else Path.home() / ".cache") / "sd-lowvram")
    except RuntimeError:  # no home folder
        return None


def folder_of(kind: str) -> Path | None:
    """Return the cache's folder for ``kind``; None: nothing is cached."""
    folder = cache_folder()
    return folder and private(folder / kind)


def private(folder: Path) -> Path | None:
    """Return ``folder``, closed to other users if they could write to it; None: it belongs to another user.

    Files in it that other users could write until now are removed from a folder of code. A system without owners of
    files is not checked.
    """
    try:
        about = os.stat(folder)
    except (OSError, ValueError):  # not there yet, or nowhere that can be written
        return folder
    if not _is_own(folder, about):
        return None
    if about.st_mode & _OTHERS_WRITE and hasattr(os, "geteuid"):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
            if folder.name in CODE and not os.stat(folder).st_mode & _OTHERS_WRITE:
                _remove_writable(folder)
    return folder


def make_private(folder: Path) -> None:
    """Make ``folder`` and the folders above it that are missing, each for the user alone.

    Raises:
        OSError: the system does not allow it.
    """
    for missing in reversed(
        [missing_folder for missing_folder in (folder, *folder.parents) if not missing_folder.exists()]
    ):
        missing.mkdir(mode=0o700, exist_ok=True)


def is_all_own(folder: Path) -> bool:
    """True if no file or folder in ``folder`` belongs to another user."""
    for above, names, files in os.walk(folder):
        for name in (*names, *files):
            with contextlib.suppress(OSError):
                if not _is_own(Path(above, name), os.lstat(os.path.join(above, name))):
                    return False
    return True


def read_private(path: Path) -> bytes | None:
    """Return the bytes of ``path``; None: it is not a regular file of the user's own, or larger than any of ours."""
    try:
        handle = os.open(path, _READ)
    except (OSError, ValueError):
        return None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES or not _is_own(path, about):
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(about.st_size)
    except OSError:
        return None
    finally:
        os.close(handle)


def write_private(data: bytes, path: Path) -> None:
    """Write ``data`` to ``path`` atomically, readable by the user alone.

    Raises:
        OSError: the system does not allow it.
    """
    make_private(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def place_of(kind: str, facts: Callable[[], Any]) -> Path | None:
    """Return the file for a value that depends on some facts and on our code; None: nothing is cached.

    Args:
        kind: name of the folder, such as "traces".
        facts: returns the facts, whose representations are the same in every process; called only with a cache.
    """
    folder = folder_of(kind)
    if folder is None:
        return None
    digest = hashlib.sha256(repr((facts(), code_digest())).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def recall(place: Path | None) -> Any:
    """Return what :func:`remember` wrote to ``place``; None if the file is missing or damaged."""
    if place is None or (data := read_private(place)) is None:
        return None
    head = len(_head(place, b""))
    if data[:head] != _head(place, memoryview(data)[head:-1]):
        return None
    try:
        return json.loads(data[head:-1])
    except (ValueError, RecursionError):
        return None


def remember(place: Path | None, value: Any) -> None:
    """Write ``value`` as JSON, objects by their attributes. A cache that cannot be written only costs time.

    Args:
        place: from :func:`place_of`.
        value: plain values, or a dataclass.
    """
    if place is None:
        return
    written = json.dumps(value, default=vars).encode()
    with contextlib.suppress(OSError):
        write_private(_head(place, written) + written + b"}", place)


def _head(place: Path, value: bytes | memoryview) -> bytes:
    """Return the begin of a file: a digest, which other values, or this one at another place, do not have."""
    digest = hashlib.sha256(os.fsencode(place.name) + b"\0")
    digest.update(value)
    return b'{"sha256": "%s", "value": ' % digest.hexdigest().encode()


def _is_own(path: Path, about: os.stat_result) -> bool:
    """True if the user of this process owns a file, or the system knows no owners; warn once of one by another user."""
    if not hasattr(os, "geteuid") or about.st_uid == os.geteuid():
        return True
    _warn_of_owner(path)
    return False


@functools.cache
def _warn_of_owner(path: Path) -> None:
    warnings.warn(
        f"the cache does not use {path}: it belongs to another user, who could put code there. Delete it, or name a "
        "folder of your own in SD_LOWVRAM_CACHE",
        stacklevel=4,
    )


def _remove_writable(folder: Path) -> None:
    for above, _, files in os.walk(folder):
        for path in (os.path.join(above, name) for name in files):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_mode & _OTHERS_WRITE:
                    os.unlink(path)


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the installed ones of ``packages``, by default those whose code a model is made of."""
    installed = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


@functools.cache
def code_digest() -> str:
    """Digest that changes when torch, the host's library, a package of kernels or our own code does."""
    digest = hashlib.sha256(repr(versions((*PACKAGES, *_KERNELS))).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
