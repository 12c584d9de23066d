"""torch.compile here: whether it can run, where it keeps its files, and code that it compiles apart from all other.

torch's compiler (dynamo, inductor) is imported where something is compiled, not before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..cache import folder_of, is_all_own, make_private, private
from ..compat.private import compiled_graphs, default_compiler_folder, more_versions, reset_compiler
from ..units import GIB
from .triton import support as triton

_OLDEST_TORCH = (2, 5)
"""Oldest torch in which modules are inputs of compiled code, so that equal modules share it."""

_MOST_CODES = 64
"""Shapes and layers for which the same function may be compiled."""

BACKEND = "inductor"
"""The compiler backend for traces of Dynamo."""

_CACHE_BYTES = 2 * GIB
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def why_not(device: torch.device) -> str | None:
    """Return the reason why nothing can be compiled for ``device``; None if nothing is known against it without a
    trial.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        return f"torch.compile lets equal blocks share their code from torch 2.5 on, this is {torch.__version__}"
    if device.type == "cuda":
        return triton.why_not(device)
    if device.type != "cpu":
        return f"torch.compile is used on NVIDIA GPUs and CPUs, not on {device.type}"
    return _lacks_on_cpu()


def _lacks_on_cpu() -> str | None:
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    named = os.environ.get("CXX", usual)
    if shutil.which(named) is None:
        return f"torch.compile needs a C++ compiler for CPUs, and {named} is not found: install one, or name it in CXX"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.is_file():
        return f"torch.compile needs Python's headers for CPUs, and {headers} is not there: install them (python3-dev)"
    return None


@functools.lru_cache(maxsize=512)
def compile_private(function: Callable[..., Any], facts: Any) -> Callable[..., Any]:
    """Compile a private copy of ``function`` for each ``facts``, so that Dynamo's guard lists stay short and code that
    users compile is untouched."""
    name = f"{function.__name__}_{abs(hash((function.__qualname__, facts)))}"
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(own, backend=BACKEND)
    return compiled


def forget() -> None:
    """Drop what was compiled in this process; its files stay."""
    compile_private.cache_clear()
    reset_compiler()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Allow compiling for all shapes of a model within the block, into a folder of our cache.

    Without a cache the folder belongs to this process alone. The user's own TORCHINDUCTOR_CACHE_DIR is respected."""
    named = os.environ.get(_CACHE_VARIABLE)  # torch itself sets it to its default where it looks for it
    ours = _folder() if named in (None, default_compiler_folder()) else None
    before = compiled_graphs()
    if ours is not None:
        os.environ[_CACHE_VARIABLE] = str(ours)
    try:
        with more_versions(_MOST_CODES):
            yield
    finally:
        if ours is not None:
            os.environ.pop(_CACHE_VARIABLE, None)
            os.environ.update({} if named is None else {_CACHE_VARIABLE: named})
            if compiled_graphs() > before:
                limit_folder(ours, _CACHE_BYTES)


def _folder() -> Path:
    cached = _make_private(folder_of("compiled"))
    return cached or Path(_process_folder().name)


@functools.cache
def _make_private(folder: Path | None) -> Path | None:
    """Return ``folder``, made private; None: it cannot be made, or holds what belongs to another user."""
    if folder is None:
        return None
    with contextlib.suppress(OSError):
        make_private(folder)
        return folder if private(folder) and is_all_own(folder) else None
    return None


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sd-lowvram-compiled-")


def limit_folder(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files of ``folder`` until it holds at most ``most_bytes``; code that is missing is compiled
    again.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                files.append((path.stat().st_mtime, path.stat().st_size, path))
    held = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if held <= most_bytes:
            break
        with contextlib.suppress(OSError):  # Windows keeps what is loaded
            path.unlink()
            held -= size
