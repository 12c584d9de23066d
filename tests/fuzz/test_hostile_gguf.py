"""Headers of GGUF files of strangers: damaged ones, and ones that announce more than any machine holds."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy
import pytest
from hostile import damaged, inputs_of_its_own, survives
from hypothesis import example, given
from hypothesis import strategies as st

from sd_lowvram.checkpoints.gguf_files import read_gguf
from sd_lowvram.errors import CheckpointError

COUNTS = st.sampled_from([0, 1, 2, 3, 7, 32, 1 << 20, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1])
KINDS = st.sampled_from([0, 1, 2, 3, 8, 12, 14, 30, 31, 99])
"""Of blocks, by their numbers: known ones, one that was taken back, and one that never was."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def array_of(kind: int, count: int, content: bytes = b"") -> bytes:
    """A file of one value of the metadata, an array that announces so many values."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"a") + struct.pack("<IIQ", 9, kind, count) + content


@st.composite
def values(draw: st.DrawFn, depth: int = 0) -> bytes:
    """A value of the metadata with the number of its type before it, or nearly."""
    kind = draw(st.sampled_from([0, 4, 6, 7, 8, 9, 10, 12, 13, 255]))
    if kind == 8:
        return struct.pack("<I", kind) + string(draw(st.binary(max_size=8)), draw(st.none() | COUNTS))
    if kind == 9:
        inner = draw(st.sampled_from([0, 4, 8, 9, 12, 77]))
        held = b"".join(draw(st.lists(values(depth + 1), max_size=2))) if depth < 6 else b""
        return struct.pack("<IIQ", kind, inner, draw(COUNTS)) + held + draw(st.binary(max_size=16))
    return struct.pack("<I", kind) + draw(st.binary(max_size=8))


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Files of the format, or nearly."""
    names = st.sampled_from([b"general.alignment", b"general.architecture", b"a"])
    told = [string(draw(names)) + draw(values()) for _ in range(draw(st.integers(0, 3)))]
    if draw(st.booleans()):
        told.append(string(b"general.alignment") + struct.pack("<II", 4, draw(st.sampled_from([0, 1, 3, 32, 1 << 31]))))
    tensors = []
    for _ in range(draw(st.integers(0, 3))):
        sides = draw(st.lists(COUNTS, max_size=5))
        stated = draw(st.just(len(sides)) | st.sampled_from([0, 9, (1 << 32) - 1]))
        place = struct.pack("<IQ", draw(KINDS), draw(COUNTS | st.just(0)))
        tensors.append(string(draw(st.binary(max_size=4))) + struct.pack(f"<I{len(sides)}Q", stated, *sides) + place)
    counts = draw(st.just((len(tensors), len(told))) | st.tuples(COUNTS, COUNTS))
    version = draw(st.sampled_from([3, 3, 3, 2, 1, 1 << 24]))
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*told, *tensors]) + bytes(draw(COUNTS) % 4096)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file as the package writes it."""
    file = tmp_path_factory.mktemp("whole") / "a.gguf"
    writer = gguf.GGUFWriter(file, "flux")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("scores", [[1, 2], [3]])
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("w", gguf.quants.quantize(numpy.ones((2, 64), numpy.float32), kind), raw_dtype=kind)
    writer.add_tensor("b", numpy.zeros(3, numpy.float32))
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    return file.read_bytes()


def read(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with survives(len(content)):
        assert all(one.end <= len(content) for one in read_gguf(file))


@inputs_of_its_own()
@given(st.data())
@example(None)
def test_headers_of_gguf(folder: Path, whole: bytes, data: st.DataObject | None) -> None:
    content = array_of(8, 1 << 40, bytes(44)) if data is None else data.draw(damaged(headers() | st.just(whole)))
    read(folder / "a.gguf", content)


@pytest.mark.parametrize("kind", [0, 8, 9, 12])
def test_an_array_is_no_longer_than_the_file(folder: Path, kind: int) -> None:
    content = array_of(kind, 1 << 40)
    content += bytes(96 - len(content))
    (folder / "b.gguf").write_bytes(content)
    with survives(len(content)), pytest.raises(CheckpointError, match="1099511627776"):
        read_gguf(folder / "b.gguf")


def test_contents_end_within_the_file(folder: Path, whole: bytes) -> None:
    (folder / "d.gguf").write_bytes(whole[:-24])  # "b", the last tensor, has 12 bytes and is padded to 32
    with pytest.raises(CheckpointError, match=r"'b' is at byte \d+ to \d+ of \d+"):
        read_gguf(folder / "d.gguf")


def test_an_undamaged_header_is_read_as_the_package_reads_it(folder: Path, whole: bytes) -> None:
    (folder / "c.gguf").write_bytes(whole)
    known = {one.name: one for one in gguf.GGUFReader(folder / "c.gguf").tensors}
    found = {one.name: one for one in read_gguf(folder / "c.gguf")}
    assert found.keys() == known.keys()
    for name, one in found.items():
        assert (one.kind, list(one.shape)) == (known[name].tensor_type, [*reversed(known[name].shape.tolist())])
        assert whole[one.begin : one.end] == known[name].data.tobytes()
