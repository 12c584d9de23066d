"""Checks of single values as they were typed; the messages name the option."""

from __future__ import annotations

import dataclasses
import io
import os
import struct
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError, OutputError
from ..settings import Settings, knobs
from ..units import parse_size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_STEPS = 1000
"""Levels of noise that Stable Diffusion was trained with: more steps have none of their own."""

MOST_PICTURES = 1000
_SHOWN = 60
LARGEST_SIDE = 1 << 14
_PIXELS_A_BYTE = 8 * 1032
"""A byte of a PNG stands for no more: a bit each, in deflate's best case."""


def check_text(option: str, text: str) -> None:
    """Raise BadInputError unless ``text`` can be written as UTF-8: a shell hands on any bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInputError(
            f"{option} {text!r} is not UTF-8: type it again, or convert the file that it is from"
        ) from None


def check_printable(option: str, name: str) -> None:
    """Raise OutputError where a file's name has a line break, or another control character."""
    odd = next((mark for mark in name if unicodedata.category(mark) in ("Cc", "Zl", "Zp")), None)
    if odd is not None:
        raise OutputError(f"{option} {name[:_SHOWN]!r} holds {odd!r}, which no file's name should: leave it out")


def check_given(**options: str | None) -> None:
    """Raise BadInputError where an option is there without a value, as an unset variable leaves it."""
    for name, value in options.items():
        if value is not None and not value.strip():
            raise BadInputError(f"--{name} is empty: give a value, or leave it out")


def check_count(option: str, count: int, most: int, least: int = 1) -> None:
    """Raise BadInputError unless ``count`` is from ``least`` to ``most``."""
    if not least <= count <= most:
        raise BadInputError(f"{option} {count} must be at least {least} and at most {most}")


def check_names(option: str, names: Iterable[str], served: Sequence[str]) -> None:
    """Raise BadInputError unless each of ``names`` is one of ``served``."""
    for name in names:
        if name not in served:
            raise BadInputError(f"{option} {name!r} is unknown: choose one of {', '.join(served)}")


def check_run(width: int | None, height: int | None, steps: int, batch: int, vram: str | None, ram: str | None) -> None:
    """Raise BadInputError unless a run of this size, length and these budgets can be asked for."""
    check_side("width", width)
    check_side("height", height)
    check_count("--steps", steps, MOST_STEPS)
    check_count("--batch", batch, MOST_PICTURES)
    for name, size in (("vram", vram), ("ram", ram)):
        if size is not None:
            parse_size(size, f"--{name}")


def checked_settings(chosen: Mapping[str, Any], policy: str | None = None) -> Settings:
    """The settings of these knobs, above those of a named policy; a SettingsError names the option."""
    for name, knob in knobs().items():
        if chosen.get(name) is not None:
            knob.check("--" + name.replace("_", "-"), chosen[name])
    if policy is None:
        return Settings(**chosen)
    decided = {name: value for name, value in chosen.items() if value is not None}
    return dataclasses.replace(Settings.policy(policy), **decided)


def check_side(name: str, value: int | None) -> None:
    """Raise BadInputError unless ``value`` pixels are a side that Stable Diffusion makes: a positive multiple of 8."""
    if value is None or (0 < value <= LARGEST_SIDE and value % 8 == 0):
        return
    if value <= 0:
        raise BadInputError(f"--{name} {value} must be a positive multiple of 8: 512, for example")
    if value > LARGEST_SIDE:
        raise BadInputError(f"--{name} {value} is more than {LARGEST_SIDE} pixels, the longest side that is served")
    below, above = value - value % 8, value - value % 8 + 8
    near = f"{below} and {above} are nearest" if below else f"{above} is nearest"
    raise BadInputError(f"--{name} {value} is not a multiple of 8: {near}")


class BoundedFile(io.FileIO):
    """Clamp read(size) to the file's length, so that a forged chunk size allocates nothing."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most to the end of the file, whatever ``size`` is."""
        left = max(0, os.fstat(self.fileno()).st_size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left)) or b""


def _check_pixels(file: Any, path: Path, option: str) -> None:
    """Raise BadInputError where an opened picture, no pixel of which has been read, claims more than its file can hold,
    or would run another program."""
    if file.format == "EPS":
        raise BadInputError(f"{option} {path} cannot be opened: it is a PostScript program; save it as PNG")
    if file.format == "PNG" and file.width * file.height > _PIXELS_A_BYTE * _bytes_of_pixels(path):
        raise BadInputError(
            f"{option} {path} cannot be opened: it claims {file.width}x{file.height} pixels and is too short for them"
        )


def _bytes_of_pixels(path: Path) -> int:
    """Bytes of a PNG's pixels (IDAT), as they are packed; texts in the file say nothing about the picture's size."""
    size, total, place = path.stat().st_size, 0, 8
    with open(path, "rb") as file:
        while place + 8 <= size:
            file.seek(place)
            length, kind = struct.unpack(">I4s", file.read(8))
            if kind == b"IDAT":
                total += min(length, size - place - 8)
            place += length + 12
    return total


def open_picture(path: Path, option: str, mode: str = "RGB") -> Image:
    """The picture in ``path``, upright.

    Raises:
        BadInputError: missing, no regular file, or no picture.
    """
    from PIL import Image, ImageOps

    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device never ends
            raise BadInputError(f"{option} {path} cannot be opened: it is not a regular file")
        with BoundedFile(path) as bounded, Image.open(bounded) as file:
            _check_pixels(file, path, option)
            return ImageOps.exif_transpose(file).convert(mode)
    except BadInputError:
        raise
    except Exception as error:  # PIL raises whatever the damaged part of a file provokes
        reason = getattr(error, "strerror", None) or "it is not a picture that can be read"
        raise BadInputError(f"{option} {path} cannot be opened: {reason}") from error
