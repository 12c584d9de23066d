"""The program's own streams: closed ones, full ones, and names that they cannot write."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def open_all() -> None:
    """Open what the caller has closed, so that no file of ours gets its number; names of any bytes can be written."""
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def give_up_stdout() -> None:
    """Discard what is still to be written to standard output; Python would try again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tell(message: str) -> None:
    """Print a line to standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        print(f"sd-lowvram: {message}", file=sys.stderr, flush=True)


def note(message: str) -> None:
    """Print a line that is not about an error."""
    tell(f"note: {message}")
