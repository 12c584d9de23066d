"""Checks of single values as they were typed; the messages name the option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError
from ..settings import Settings, knobs
from ..units import parse_size

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_STEPS = 1000
"""Levels of noise that Stable Diffusion was trained with: more steps have none of their own."""

MOST_PICTURES = 1000
LARGEST_SIDE = 1 << 14
DEVICES = ("cpu", "cuda", "mps", "xpu")


def check_text(option: str, text: str) -> None:
    """Raise BadInputError unless ``text`` can be written as UTF-8: a shell hands on any bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInputError(
            f"{option} {text!r} is not UTF-8: type it anew, or convert the file that it is from"
        ) from None


def check_given(**options: str | None) -> None:
    """Raise BadInputError where an option is there without a value, as an unset variable leaves it."""
    for name, value in options.items():
        if value is not None and not value.strip():
            raise BadInputError(f"--{name} is empty: give a value, or leave it out")


def check_count(option: str, count: int, most: int) -> None:
    """Raise BadInputError unless ``count`` is from 1 to ``most``."""
    if not 1 <= count <= most:
        raise BadInputError(f"{option} {count} must be at least 1 and at most {most}")


def check_names(option: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise BadInputError unless each of ``names`` is one of ``known``."""
    for name in names:
        if name not in known:
            raise BadInputError(f"{option} {name!r} is unknown: choose one of {', '.join(known)}")


def check_run(width: int | None, height: int | None, steps: int, batch: int, vram: str | None, ram: str | None) -> None:
    """Raise BadInputError unless a run of this size, length and these budgets can be asked for."""
    check_side("width", width)
    check_side("height", height)
    check_count("--steps", steps, MOST_STEPS)
    check_count("--batch", batch, MOST_PICTURES)
    for name, size in (("vram", vram), ("ram", ram)):
        if size is not None:
            parse_size(size, f"--{name}")


def checked_settings(chosen: Mapping[str, Any]) -> Settings:
    """The settings of these knobs; a SettingsError names the option."""
    for name, knob in knobs().items():
        if chosen.get(name) is not None:
            knob.check("--" + name.replace("_", "-"), chosen[name])
    return Settings(**chosen)


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
    raise BadInputError(f"--{name} {value} is no multiple of 8: {near}")


def check_device_name(name: str | None) -> None:
    """Raise BadInputError unless ``name`` is of a kind of device that sd-lowvram knows."""
    if name is None:
        return
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (number.isascii() and number.isdigit())):
        raise BadInputError(
            f"--device {name!r} is unknown: choose one of {', '.join(DEVICES)}, or cuda:1; cpu always can"
        )


def check_device(name: str) -> str:
    """Raise BadInputError unless torch can compute on ``name``."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise BadInputError(f"--device {name!r} cannot be used ({reason[:120]}): cpu always can") from error
    return name


def open_picture(path: Path, option: str, mode: str = "RGB") -> Image:
    """The picture in ``path``, upright.

    Raises:
        BadInputError: missing, no regular file, or no picture.
    """
    from PIL import Image, ImageOps

    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device never ends
            raise BadInputError(f"{option} {path} cannot be opened: it is no regular file")
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert(mode)
    except BadInputError:
        raise
    except Exception as error:  # PIL raises whatever the damaged part of a file provokes
        reason = getattr(error, "strerror", None) or "it is no picture that can be read"
        raise BadInputError(f"{option} {path} cannot be opened: {reason}") from error
