"""Transformers in GGUF files: facts from their header, and their weights, mapped from the file in its own blocks.

The ``gguf`` package knows the kinds of blocks and diffusers has the layers that widen them; both are needed only where
such a file is given. Names in these files are those of the published checkpoints, so their converters serve.

Headers come from strangers: every count and length is compared with the bytes that the file has left before anything is
made of it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .safetensors_header import Header, TensorEntry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_LARGEST_HEADER, _MOST_TENSORS, _MOST_SIDES, _MOST_NESTED = 100_000_000, 1 << 15, 8, 4
"""Bytes of a header, tensors of a file, sides of a tensor, arrays inside of arrays: more than any model has."""

_VERSIONS = (2, 3)
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_VALUES = {0: 1, 1: 1, 2: 2, 3: 2, _UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a plain value in the metadata, by the number of its type."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor: its kind of blocks ("Q4_K"), the shape of the widened weight, that of the stored bytes, its place."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    begin: int
    end: int


def is_gguf_file(path: Path) -> bool:
    """True if the regular file at ``path``, or its link target, begins like a GGUF file."""
    try:
        if not path.is_file():  # a pipe might never answer
            return False
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False  # whoever reads it next says why


def gguf_header(path: Path) -> Header:
    """The tensors of a GGUF file: shapes of the widened weights, and what kind of blocks each is in ("Q4_K").

    Raises:
        CheckpointError: truncated or damaged, of a kind of blocks that nothing here widens, or the ``gguf`` package,
            or a diffusers that has such layers, is not installed.
    """
    served = {kind.name for kind in _utils(path).dequantize_functions} | set(_PLAIN)
    tensors = {}
    for entry in read_gguf(path):
        if entry.kind.name not in served:
            raise CheckpointError(
                f"{path} holds {entry.name} in {entry.kind.name}, which diffusers cannot widen: get the file in one of "
                f"{', '.join(sorted(served - set(_PLAIN)))}"
            )
        tensors[entry.name] = TensorEntry(entry.kind.name, entry.shape, entry.begin, entry.end)
    return Header(tensors, {}, 0)


def gguf_weights(path: Path, *, meta: bool) -> dict[str, Tensor]:
    """The weights of a GGUF file by name: blocks as diffusers' ``GGUFParameter``, all else as plain tensors.

    Args:
        meta: without contents.
    """
    import torch

    utils = _utils(path)
    whole = torch.empty(path.stat().st_size, dtype=torch.uint8, device="meta") if meta else _map_file(path)
    weights = {}
    for entry in read_gguf(path):
        raw, name = whole[entry.begin : entry.end], entry.kind.name
        if name in _PLAIN:
            weights[entry.name] = raw.view(getattr(torch, _PLAIN[name])).view(entry.shape)
        else:
            weights[entry.name] = utils.GGUFParameter(raw.view(entry.stored), quant_type=entry.kind)
    return weights


def widened_gguf(blocks: Tensor, computes: torch.dtype) -> Tensor:
    """The numbers in a ``GGUFParameter``."""
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    wide: Tensor = dequantize_gguf_tensor(blocks)
    return wide.to(computes)


def gguf_linear(blocks: Tensor, bias: Tensor | None, computes: torch.dtype) -> nn.Module:
    """diffusers' linear layer of a ``GGUFParameter``: it widens the weight whenever it is called."""
    import torch
    from diffusers.quantizers.gguf.utils import GGUFLinear
    from torch import nn

    rows, columns = blocks.quant_shape  # type: ignore[attr-defined]
    with torch.device("meta"):
        layer: nn.Module = GGUFLinear(columns, rows, bias is not None, computes)
    layer.weight = blocks
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return layer


def _map_file(path: Path) -> Tensor:
    import torch

    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _utils(path: Path) -> Any:
    try:
        import gguf  # noqa: F401 the next line's import needs it, and would not say so
        from diffusers.quantizers.gguf import utils
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a GGUF file, which takes the gguf package and a diffusers that knows it: "
            f"pip install gguf ({error})"
        ) from error
    return utils


def read_gguf(path: Path) -> list[_Tensor]:
    """The tensors in the header of a GGUF file; no weight is read.

    Raises:
        CheckpointError: unreadable, truncated, or a header that contradicts itself or the file.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"{path} cannot be read: it is not a regular file")
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), min(about.st_size, _LARGEST_HEADER), access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data, about.st_size).tensors()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}): download it again") from error


class _Reader:
    """Reads a header from front to back.

    Args:
        data: the beginning of the file.
        size: of the whole file.
    """

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data, self._size, self._at, self._alignment = data, size, 0, 32

    def tensors(self) -> list[_Tensor]:
        """The tensors, each within the file.

        Raises:
            ValueError: something is larger than what the file has left, or makes no sense.
        """
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin as a GGUF file does")
        if (version := self._number("<I")) not in _VERSIONS:
            raise ValueError(f"version {version} of the format is not one of {_VERSIONS}")
        # A tensor takes at least 32 bytes, a value of the metadata 13.
        count, values = self._count(32, "tensors"), self._count(13, "values")
        if count > _MOST_TENSORS:
            raise ValueError(f"it announces {count} tensors, more than {_MOST_TENSORS}")
        for _ in range(values):
            self._value()
        headers = [self._tensor() for _ in range(count)]
        begin = -(-self._at // self._alignment) * self._alignment
        entries = sorted(
            (self._place(begin, *header) for header in headers), key=lambda entry: (entry.begin, entry.end)
        )
        if len({entry.name for entry in entries}) != count:
            raise ValueError("a name stands there twice")
        if any(entry.end > after.begin for entry, after in itertools.pairwise(entries)):
            raise ValueError("two tensors are at the same place")
        return entries

    def _skip(self, length: int) -> int:
        """Pass over so many bytes; returns where they begin.

        Raises:
            ValueError: the file, or the largest header, ends before.
        """
        begin, left = self._at, len(self._data) - self._at
        if length > left:
            raise ValueError(f"at byte {begin} it announces {length} bytes where {left} are left")
        self._at += length
        return begin

    def _take(self, length: int) -> bytes:
        begin = self._skip(length)
        return self._data[begin : self._at]

    def _number(self, form: str) -> int:
        number: int = struct.unpack_from(form, self._data, self._skip(struct.calcsize(form)))[0]
        return number

    def _count(self, least: int, what: str) -> int:
        """Read the number of items that follow, each of at least ``least`` bytes."""
        count = self._number("<Q")
        if count * least > len(self._data) - self._at:
            raise ValueError(f"at byte {self._at} it announces {count} {what}, and is too short for them")
        return count

    def _string(self) -> bytes:
        return self._take(self._number("<Q"))

    def _value(self) -> None:
        """Pass over a value of the metadata, of which only the alignment of the data matters."""
        name, kind, at = self._string(), self._number("<I"), self._at
        self._pass_over(kind)
        if name == b"general.alignment":
            if kind != _UINT32:
                raise ValueError("general.alignment is not a 32-bit number")
            self._alignment = struct.unpack_from("<I", self._data, at)[0]
            if self._alignment.bit_count() != 1:
                raise ValueError(f"general.alignment is {self._alignment}, no power of two")

    def _pass_over(self, kind: int, depth: int = 0) -> None:
        if kind == _STRING:
            self._skip(self._number("<Q"))
        elif kind == _ARRAY and depth < _MOST_NESTED:
            inner = self._number("<I")
            count = self._count(_VALUES.get(inner, 8), "values of an array")
            if inner in _VALUES:
                self._skip(count * _VALUES[inner])
            else:
                for _ in range(count):
                    self._pass_over(inner, depth + 1)
        elif kind in _VALUES:
            self._skip(_VALUES[kind])
        else:
            raise ValueError(f"at byte {self._at} there is a value of the unknown type {kind}")

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """The name, the shape, the number of the kind of blocks and the offset of the next tensor."""
        name = self._string().decode("utf-8")
        sides = self._number("<I")
        if sides > _MOST_SIDES:
            raise ValueError(f"{name[:60]!r} has {sides} sides")
        shape = struct.unpack(f"<{sides}Q", self._take(8 * sides))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _place(self, begin: int, name: str, shape: tuple[int, ...], number: int, offset: int) -> _Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(number)
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"{name[:60]!r} is of the unknown kind {kind.name}")
        block, taken = GGML_QUANT_SIZES[kind]
        last = shape[-1] if shape else 1
        if last % block:
            raise ValueError(f"{name[:60]!r} has rows of {last}, which are not blocks of {block}")
        stored = (*shape[:-1], last // block * taken)
        first = begin + offset
        end = first + math.prod(stored)
        if offset % self._alignment or end > self._size:
            raise ValueError(f"{name[:60]!r} is at byte {first} to {end} of {self._size}")
        return _Tensor(name, kind, shape, stored, first, end)
