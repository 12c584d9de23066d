"""Times as people read them."""

from __future__ import annotations

LONG = 600
"""Seconds from which on a plan says clearly that it is slow."""


def format_time(seconds: float) -> str:
    """``seconds`` for a person to read: "0.4 s", "12 s", "3 min 20 s", "1 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 and whole < 600 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 >= 60 else "")
