"""Contents of a .safetensors file, from its header alone, and a check that the file is complete.

The layout, as the safetensors project states it: eight bytes with the length of a JSON header, the header, the data.
Headers come from strangers: every number in them is checked against the file.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..units import format_size

_LARGEST_HEADER = 100_000_000
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
_BITS |= {"I64": 64, "U64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: its type as in safetensors ("F16"), its shape, and its place after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, the free metadata, and the offset at which the data begins, in bytes."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_offset: int

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor ``name``; empty when there is none."""
        entry = self.tensors.get(name)
        return entry.shape if entry else ()


def read_header(path: Path) -> Header:
    """Read and check the header of ``path``; no weight is read.

    Raises:
        CheckpointError: no such file, unreadable, truncated, or a header that contradicts itself or the file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, and a device never ends
            raise CheckpointError(f"{path} cannot be read: it is not a regular file")
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(
                    f"{path} is truncated: {size} bytes are not a .safetensors file; download it again"
                )
            if length > _LARGEST_HEADER:
                raise CheckpointError(f"{path} is not a .safetensors file: it announces a header of {length} bytes")
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: its header needs {format_size(8 + length)} and the file has "
                    f"{format_size(size)}; download it again"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    tensors, metadata = _parse(path, text)
    _check_places(path, tensors, size - 8 - length)
    return Header(tensors, metadata, 8 + length)


def read_values(path: Path, header: Header, name: str) -> list[float]:
    """Read the numbers of a small tensor of 16 or 32 bits.

    Args:
        path: the file.
        header: its header.
        name: name of the tensor.

    Raises:
        CheckpointError: the tensor has another type, or cannot be read.
    """
    entry = header.tensors[name]
    try:
        with open(path, "rb") as file:
            file.seek(header.data_offset + entry.begin)
            data = file.read(entry.end - entry.begin)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if entry.dtype == "BF16":  # the upper half of 32 bits
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    letter = {"F16": "e", "F32": "f", "BF16": "f"}.get(entry.dtype)
    if letter is None:
        raise CheckpointError(f"{path} holds {name} as {entry.dtype}: 16 or 32 bits are read")
    return [value for (value,) in struct.iter_unpack(f"<{letter}", data)]


def _parse(path: Path, text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=_refuse_repeats)
        metadata = raw.pop("__metadata__", {})
        tensors = {name: _entry(entry) for name, entry in raw.items()}
        return tensors, {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a .safetensors file: its header cannot be understood ({error})"
        ) from error


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands there twice")
    return table


def _entry(raw: Any) -> TensorEntry:
    shape, (begin, end) = raw["shape"], raw["data_offsets"]
    numbers = [*shape, begin, end]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("sizes and offsets must be whole numbers from zero on")
    bits = math.prod(shape) * _BITS[raw["dtype"]]
    if bits % 8 or end - begin != bits // 8:
        raise ValueError(f"a tensor of shape {shape} and type {raw['dtype']} does not take {end - begin} bytes")
    return TensorEntry(raw["dtype"], tuple(shape), begin, end)


def _check_places(path: Path, tensors: dict[str, TensorEntry], available: int) -> None:
    """The data must be covered without holes or overlaps, as the format demands, and reach the end of the file."""
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise CheckpointError(
                f"{path} has a damaged header: {name!r} does not begin where the tensor before it ends"
            )
        position = entry.end
    if position > available:
        missing = format_size(position - available)
        raise CheckpointError(f"{path} is truncated: {missing} of its weights are missing; download it again")
    if position < available:
        raise CheckpointError(f"{path} is damaged: {format_size(available - position)} follow its last tensor")
