"""The interval at which the latents of a run are written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import BadInputError

_WRITTEN = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|steps?)\s*")


@dataclass(frozen=True)
class Interval:
    """Every so many seconds, or steps; with None of both before the decode alone, when they always are."""

    seconds: float | None = 60
    steps: int | None = None


def parse_interval(text: str, what: str) -> Interval:
    """The interval that ``text`` means: "30s", "5 min", "10 steps" or "never".

    Raises:
        BadInputError: it is none of these, or not above zero; the message names it as ``what``.
    """
    if text.strip() == "never":
        return Interval(None)
    match = _WRITTEN.fullmatch(text)
    count, unit = (float(match[1]), match[2]) if match else (0, "")
    if count <= 0 or (unit.startswith("step") and count != int(count)):
        raise BadInputError(f'{what} {text!r} is not an interval: write it like "30s", "5min" or "10steps", or never')
    if unit.startswith("step"):
        return Interval(None, int(count))
    return Interval(count * (60 if unit == "min" else 1))
