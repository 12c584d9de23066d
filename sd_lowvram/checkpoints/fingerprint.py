"""Fingerprints of models' files, without reading them whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import CheckpointError
from .architectures import MODELS
from .split_files import is_split, weights_of

_BEGINNING = 1 << 20
"""Bytes that are read of every file: the header of most models, and small files whole."""

_SAMPLES, _SAMPLE = 256, 4096
_READ = (".safetensors", ".gguf", ".json", ".bin", ".ckpt", ".txt")


def fingerprint(path: Path) -> str:
    """A digest of a model's file, or of the files in its folder: their names, lengths, beginnings, and pieces from all
    over them. Another training or merge of the same shapes changes nearly all numbers, and so these pieces.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for name, file in _files(path):
            digest.update(f"{name}\0{file.stat().st_size}\0".encode("utf-8", "surrogateescape"))
            _add_pieces(file, digest)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _files(path: Path) -> list[tuple[str, Path]]:
    """The files of a model by their names in it; a single file that was renamed is the same."""
    if not path.is_dir():
        return [(".", path)]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in _READ and file.is_file())
    named = [(file.relative_to(path).as_posix(), file) for file in files]
    if is_split(path):
        named += [(name, weights_of(path / name).path) for name in MODELS if (path / name).is_dir()]
    return named


def _add_pieces(file: Path, digest: hashlib._Hash) -> None:
    size = file.stat().st_size
    with open(file, "rb") as data:
        digest.update(data.read(_BEGINNING))
        for number in range(_SAMPLES if size > _BEGINNING else 0):
            data.seek(_BEGINNING + (size - _BEGINNING) * number // _SAMPLES)
            digest.update(data.read(_SAMPLE))
