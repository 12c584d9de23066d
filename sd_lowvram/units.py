"""Byte sizes and times as people write and read them: "4GB", "3.5 GiB", 4096 (MiB), "3 min 20 s"."""

from __future__ import annotations

import math
import re

from .errors import BadInputError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"": MIB, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB << 10}
_PATTERN = re.compile(r"\s*(\d+(?:[.,]\d+)?|[.,]\d+)\s*(?:(b)|([kmgt]?)(?:i?b)?)\s*", re.IGNORECASE)
_MOST = 1 << 60
_SMALLEST_BARE = 64
"""Smallest bare number that is accepted as MiB. Smaller ones may be meant as GB, so the error asks."""

_EXAMPLES = 'write it like "4GB", "3.5 GiB", "700 MB" or 4096 (MiB)'


def parse_size(value: int | float | str, what: str = "size") -> int:
    """Parse a size of memory. A bare number counts MiB; memory is sold in powers of two, so GB and GiB mean the same.

    Args:
        value: "4GB", "3.5 GiB", or 4096 (MiB).
        what: name of the value, for the error.

    Returns:
        Bytes.

    Raises:
        BadInputError: the value is not a size, is not above zero, or is a bare number so small that GB may be meant.
    """
    text = format(value, "f") if isinstance(value, float) else str(value)
    match = _PATTERN.fullmatch(text)
    if match is None or isinstance(value, bool):
        raise BadInputError(f"{what} {value!r} is not a size: {_EXAMPLES}")
    number, plain_bytes, unit = match.groups()
    size = float(number.replace(",", ".")) * _UNITS[(plain_bytes or unit or "").lower()]
    if size >= _MOST:
        raise BadInputError(f"{what} {value!r} is more than any machine has: {_EXAMPLES}")
    if size < 1:
        raise BadInputError(f"{what} {value!r} must be more than zero: {_EXAMPLES}")
    if not (plain_bytes or unit) and size < _SMALLEST_BARE * MIB:
        plain = str(value).strip()
        raise BadInputError(f'{what} {plain} without a unit counts MiB: did you mean "{plain}GB"? (or "{plain}MB"?)')
    return int(size)


def format_size(size: int) -> str:
    """``size`` bytes for a person to read: "512 B", "84 MiB", "3.5 GiB"."""
    for unit, step in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= step:
            amount = size / step
            return f"{amount:.0f} {unit}" if amount >= 100 or amount == int(amount) else f"{amount:.1f} {unit}"
    return f"{size} B"


def format_share(size: int, whole: int) -> str:
    """``size`` of ``whole`` bytes for a person to read: "5.8 of 8 GiB", or with both units where they differ."""
    number, unit = format_size(size).split()
    of = format_size(whole)
    return f"{number if of.endswith(f' {unit}') else f'{number} {unit}'} of {of}"


def format_least(size: int) -> str:
    """``size`` bytes that are needed, for a person to give back: as :func:`format_size`, finer and never less."""
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("B", 1))
    unit, step = next((name, step) for name, step in units if size >= step or step == 1)
    parts = {"GiB": 100, "MiB": 10}.get(unit, 1)
    return f"{math.ceil(size * parts / step) / parts:g} {unit}"


LONG = 600
"""Seconds from which on a plan says clearly that it is slow."""


def format_time(seconds: float) -> str:
    """``seconds`` for a person to read: "0.05 s", "0.4 s", "12 s", "3 min 20 s", "1 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.2f} s" if 0 < seconds < 0.1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 >= 60 else "")
