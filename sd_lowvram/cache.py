"""Where traces and plans are remembered, and until when: torch is not imported here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
from pathlib import Path

_PACKAGES = ("torch", "diffusers", "transformers", "peft")


def cache_folder() -> Path | None:
    """Where all is remembered: SD_LOWVRAM_CACHE, or the user's cache folder; None when the former is empty."""
    named = os.environ.get("SD_LOWVRAM_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sd-lowvram"


@functools.cache
def code_digest() -> str:
    """Changes when torch, the host's library or our own code does."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(importlib.metadata.version(package).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
