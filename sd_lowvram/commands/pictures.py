"""Saves pictures: checked before the run, written whole or not at all, with the parameters that made them inside.

The parameters stand in the PNG text chunk "parameters", in the form that AUTOMATIC1111's WebUI writes and its
"PNG Info" tab, and many other programs, read.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutputError
from ..files import temporary_beside, write_whole
from ..saved_latents.file import ENDING
from ..units import format_size
from .values import check_printable

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Path("outputs")


def parameters_text(prompt: str, negative: str, values: Mapping[str, Any]) -> str:
    """The text of the "parameters" chunk: the prompt, the negative prompt if any, then ``values`` in one line.

    Values that hold a comma, a colon or a line break are written as JSON strings; None is left out.
    """
    pairs = ", ".join(f"{key}: {_quote(value)}" for key, value in values.items() if value is not None)
    return "\n".join([prompt, *([f"Negative prompt: {negative}"] if negative else []), pairs])


def _quote(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(mark in text for mark in ",:\n") else text


def output_paths(written: str | None, count: int, seed: int, folder: Path = FOLDER) -> list[Path]:
    """Paths of ``count`` pictures.

    A file name is used as ``written`` (and overwritten; several pictures get "-1", "-2", ... before the ending). A
    folder, or None (``outputs/``), gets unused numbered names: "00012-SEED.png".

    Raises:
        OutputError: a file name that does not end in .png, or has a line break in it.
    """
    if written is not None:
        check_printable("the output", written)
    target = folder if written is None else Path(written)
    if written is not None and not (target.is_dir() or written.endswith(("/", os.sep))):
        if target.suffix.lower() != ".png":
            raise OutputError(f"the output {target} must end in .png, or be a folder (that is there, or ends in /)")
        if count == 1:
            return [target]
        return [target.with_name(f"{target.stem}-{n}{target.suffix}") for n in range(1, count + 1)]
    there = itertools.chain(target.glob("*.png"), target.glob(f"*{ENDING}"))  # of runs that were ended, too
    taken = [int(match[1]) for file in there if (match := re.match(r"(\d+)-", file.name))]
    first = max(taken, default=-1) + 1
    return [target / f"{first + n:05d}-{seed + n}.png" for n in range(count)]


def check_writable(path: Path, size: int) -> None:
    """Make sure that a file of ``size`` bytes can be written to ``path`` now; nothing is left behind, no folder either.

    Raises:
        OutputError: the folder cannot be made or written to, the disk is full, or ``path`` is not a regular file.
    """
    try:
        with _folder_for_now(path.parent):
            if path.exists() and not stat.S_ISREG(path.stat().st_mode):
                raise OutputError(f"the output {path} is not a regular file: give the name of a .png file")
            free = shutil.disk_usage(path.parent).free
            if free < size:
                raise OutputError(_full(path, size, free))
            with temporary_beside(path) as (file, _):
                _reserve(file, size)
    except OSError as error:
        raise _output_error(path, size, error) from error


@contextlib.contextmanager
def _folder_for_now(folder: Path) -> Iterator[None]:
    """``folder`` is there within the block; what was made of it goes again, unless something lies in it by then."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            for created in missing:
                created.rmdir()


def _reserve(file: Any, size: int) -> None:
    """Reserve ``size`` bytes in the file system, so that quotas and limits fail now, not after the last step."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.write(bytes(size))
        file.flush()


def _full(path: Path, size: int, free: int) -> str:
    return (
        f"the disk of {path.parent} is full: {format_size(free)} are free and {format_size(size)} needed; "
        "free some space or give another --output"
    )


def _output_error(path: Path, size: int, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason = (error.strerror or "full").lower()
        return OutputError(
            f"{path} cannot hold {format_size(size)} ({reason}): free some space, or give another --output"
        )
    return OutputError(f"{path} cannot be written ({error.strerror or error}): give another --output")


def save_picture(image: Image, path: Path, parameters: str) -> Path:
    """Write ``image`` as PNG with ``parameters`` inside, as :func:`save_png` does."""
    return save_png(png_of(image, {"parameters": parameters}), path)


def png_of(image: Image, texts: Mapping[str, str]) -> bytes:
    """``image`` as PNG with ``texts`` inside, by the names of their chunks."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text.encode("utf-8", "replace").decode())  # a model's name may be any bytes
    data = io.BytesIO()
    image.save(data, format="PNG", pnginfo=info)
    return data.getvalue()


def save_png(data: bytes, path: Path) -> Path:
    """Write a PNG; ``path`` then holds the whole picture, or what it held before. Its folder is made if need be.

    When ``path`` fails at this point the picture is not lost: it goes to the folder for temporary files, and the
    error says where.

    Raises:
        OutputError: it could not be written to ``path``.
    """
    target = path.resolve()
    try:
        write_whole(data, target)
    except OSError as error:
        failure = _output_error(path, len(data), error)
        rescue = Path(tempfile.gettempdir()) / f"sd-lowvram-{os.getpid()}-{path.name[-40:]}"
        try:
            write_whole(data, rescue)
        except OSError:
            raise failure from error
        raise OutputError(f"{failure}; the picture is in {rescue}") from error
    return path
