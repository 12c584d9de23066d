"""Compiling the runtime, and why it cannot be done here."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "runtime"
CUDA = "13"
"""The runtime's major version: what torch's libraries name, and the layout of the card's properties."""
_RUNTIME = f"libcudart.so.{CUDA}"
_PLAIN = {"libcuda.so.1": "driver.c", "libnvidia-ml.so.1": "management.c"}


def hindrance() -> str | None:
    """Why there is no simulated card in this environment; None where there is one. torch is not imported."""
    for compiler in ("gcc", "g++"):
        if shutil.which(compiler) is None:
            return f"{compiler} is not installed"
    if importlib.util.find_spec("torch") is None or not _headers():
        return (
            f"torch in this environment is not its build for CUDA {CUDA}: make test-simulated-gpu makes one that has it"
        )
    return None


@functools.cache
def _headers() -> tuple[Path, ...]:
    """Where the runtime's headers lie: torch's CUDA build brings them along, some of them with triton."""
    site = Path(str(importlib.util.find_spec("torch").origin)).parents[1]  # type: ignore[union-attr]
    folders = site / "nvidia" / f"cu{CUDA}" / "include", site / "triton" / "backends" / "nvidia" / "include"
    needed = folders[0] / "driver_types.h", folders[1] / "crt" / "host_defines.h"
    return folders if all(file.exists() for file in needed) else ()


def built() -> tuple[Path, ...]:
    """The libraries in place of CUDA's runtime, of the driver and of what manages that, compiled at the first use and
    after every change."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir(), f"sd-lowvram-simulated-gpu-{os.getuid()}-{digest.hexdigest()[:16]}")
    if not folder.exists():
        _compile(folder)
    return tuple(folder / name for name in (_RUNTIME, *_PLAIN))


def _compile(folder: Path) -> None:
    shared = ["-O1", "-fPIC", "-shared"]
    commands = {name: ["gcc", *shared, _SOURCES / source] for name, source in _PLAIN.items()}
    commands[_RUNTIME] = ["g++", *shared, "-std=c++17", *(f"-I{include}" for include in _headers())]
    commands[_RUNTIME] += [_SOURCES / "cudart.cpp", f"-Wl,--version-script={_SOURCES / 'exports.map'}"]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as scratch:
        whole = Path(scratch, "whole")
        whole.mkdir()
        for name, command in commands.items():
            subprocess.run([*command, f"-Wl,-soname,{name}", "-o", whole / name], check=True)
        try:
            whole.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
