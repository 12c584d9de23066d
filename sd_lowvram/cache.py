"""Where traces and plans are remembered, and until when: torch is not imported here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "diffusers", "transformers", "peft")
"""Whose code a model is made of."""


def cache_folder() -> Path | None:
    """Where all is remembered: SD_LOWVRAM_CACHE, or the user's cache folder; None when the former is empty."""
    named = os.environ.get("SD_LOWVRAM_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sd-lowvram"


def place_of(kind: str, facts: Callable[[], Any]) -> Path | None:
    """The file for what hangs on some facts and on our code, in the folder of its kind; None: nothing is remembered.

    Args:
        facts: tells them, where they are asked for; their representations are the same in every process.
    """
    folder = cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(repr((facts(), code_digest())).encode()).hexdigest()
    return folder / kind / f"{digest[:32]}.json"


def remembered(place: Path | None) -> Any:
    """What :func:`remember` wrote there; None: nothing that can be read."""
    try:
        return json.loads(place.read_text(encoding="utf-8")) if place else None
    except (OSError, ValueError):
        return None


def remember(place: Path | None, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all, objects by their attributes; a cache that cannot be written only
    costs time."""
    if place is None:
        return
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="utf-8") as file:
            try:
                file.write(json.dumps(value, default=vars))
            except BaseException:
                os.unlink(file.name)
                raise
        os.replace(file.name, place)


def versions() -> dict[str, str]:
    """Of the packages that are installed of those whose code a model is made of."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def code_digest() -> str:
    """Changes when torch, the host's library or our own code does."""
    digest = hashlib.sha256()
    for version in versions().values():
        digest.update(version.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
