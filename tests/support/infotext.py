"""Reads a picture's parameters as the WebUI's "PNG Info" does."""

from __future__ import annotations

import contextlib
import json
import re

_PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
_NEGATIVE = "Negative prompt:"


def parse_parameters(text: str) -> tuple[str, str, dict[str, str]]:
    """Prompt, negative prompt and values out of a "parameters" chunk, as the WebUI's "PNG Info" reads it."""
    *lines, last = text.strip().split("\n")
    pairs = _PAIR.findall(last)
    if len(pairs) < 3:
        lines, pairs = [*lines, last], []
    start = next((n for n, line in enumerate(lines) if line.strip().startswith(_NEGATIVE)), len(lines))
    prompt = "\n".join(line.strip() for line in lines[:start])
    negative = "\n".join(line.strip() for line in lines[start:]).removeprefix(_NEGATIVE).strip()
    return prompt, negative, {key: _unquoted(value) for key, value in pairs}


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == '"':
        with contextlib.suppress(ValueError):
            return str(json.loads(value))
    return value
