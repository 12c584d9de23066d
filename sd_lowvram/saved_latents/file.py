"""The file: safetensors with one JSON text in its metadata, and a checksum over every byte.

Such files come from strangers too: nothing is believed before it was checked against the file, nothing in it is run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.safetensors_header import read_header
from ..errors import BadInputError, CheckpointError
from ..files import write_whole

if TYPE_CHECKING:
    import torch

ENDING = ".latents.safetensors"
_FORMAT = "sd_lowvram_latents"
_VERSION = "1"
_LARGEST_HEADER = 4 << 20
_PIECE = 1 << 20
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class Saved:
    """Contents of a file: ``about``, of JSON types, and tensors by name."""

    about: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def write_saved(saved: Saved, path: Path) -> None:
    """Write ``saved`` to ``path`` atomically: a crash or power cut leaves the old contents or the new.

    Raises:
        OSError: the file cannot be written.
    """
    import safetensors.torch

    metadata = {_FORMAT: _VERSION, "sha256": _NO_DIGEST, "run": json.dumps(saved.about)}
    data = safetensors.torch.save(saved.tensors, metadata)
    digest = hashlib.sha256(data).hexdigest()
    begin = data.index(_field(_NO_DIGEST), 8)  # inside the text of the run its quotes would be escaped
    write_whole(data[:begin] + _field(digest) + data[begin + len(_field(digest)) :], path)


def read_saved(path: Path) -> Saved:
    """Read the contents of ``path``. Magic, lengths and checksum are checked before any tensor is read.

    Raises:
        BadInputError: the file cannot be read, was not written by :func:`write_saved`, or is damaged.
    """
    try:
        _check_length(path)
        header = read_header(path)
        if header.metadata.get(_FORMAT) != _VERSION:
            raise BadInputError(f"{path} holds no latents that were saved by this version of sd-lowvram")
        if header.metadata.get("sha256", "") != _digest(path, header.data_offset, header.metadata.get("sha256", "")):
            raise BadInputError(f"{path} is damaged: its checksum is of other bytes; an older copy of it may be whole")
        about = json.loads(header.metadata["run"])
        if not isinstance(about, dict):
            raise ValueError("it does not describe a run")
        import safetensors.torch

        return Saved(about, safetensors.torch.load_file(path))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path} ").removesuffix("; download it again")
        raise BadInputError(f"{path} holds no latents that can be read: it {reason}") from error
    except (KeyError, ValueError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"{path} holds no latents that can be read ({type(error).__name__})") from error


def _field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _check_length(path: Path) -> None:
    """Raise BadInputError if the header of a regular file is longer than any that we write."""
    if path.is_file():
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > _LARGEST_HEADER:
            raise BadInputError(f"{path} holds no latents of sd-lowvram: its header is longer than any of them")


def _digest(path: Path, header_bytes: int, digest: str) -> str:
    """The checksum of the file without its own checksum, ``digest``."""
    with open(path, "rb") as file:
        hashed = hashlib.sha256(file.read(header_bytes).replace(_field(digest), _field(_NO_DIGEST), 1))
        while piece := file.read(_PIECE):
            hashed.update(piece)
    return hashed.hexdigest()
