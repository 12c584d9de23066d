"""Names of the pictures that the demo model knows, from its training list."""

from __future__ import annotations

import re
from pathlib import Path

_LIST = Path(__file__).with_name("things.txt")
_FILLERS = frozenset(["a", "an", "the", "of", "on", "in", "and", "with", "picture", "photo", "drawing", "icon"])


def groups() -> dict[str, list[list[str]]]:
    """Group ("animals") -> the things in it, each with all of its names, the usual one first."""
    groups: dict[str, list[list[str]]] = {}
    for line in _LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            things = groups[line[3:]] = []
        elif not line.startswith("#"):
            things.append([name.strip() for name in line.partition(":")[2].split(",")])
    return groups


def unknown_words(prompt: str) -> list[str]:
    """The words of ``prompt`` that stand in no name, each once, in order."""
    names = " ".join(name for things in groups().values() for thing in things for name in thing)
    words = _FILLERS | set(_words(names))
    return [word for word in dict.fromkeys(_words(prompt)) if word not in words]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
