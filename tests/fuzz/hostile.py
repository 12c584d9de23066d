"""Inputs of people who mean harm, or of damaged files; and what is asked of whatever reads them.

Strategies for bytes and values, and :func:`survives`, in which they are read: only errors of ours, within seconds, and
without memory that a few bytes asked for.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sd_lowvram.errors import LowVRAMError

SECONDS = 10
ROOM = 4 << 20
"""Bytes that reading takes whatever the file: Python's own objects, and tables that are made once."""

INPUTS = int(os.environ.get("SD_LOWVRAM_FUZZ", "1000"))
"""Inputs of all targets together, but for those that have :func:`inputs_of_its_own`."""

WORST: dict[str, tuple[int, int]] = {}
"""By test, the most bytes that were taken while an input was read, and the size of that input."""


def inputs(share: float) -> settings:
    """The settings of a target that gets this share of all inputs; they are other ones in every run."""
    slow = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
        HealthCheck.large_base_example,
    ]
    return settings(max_examples=max(1, round(INPUTS * share)), deadline=None, suppress_health_check=slow)


def inputs_of_its_own() -> settings:
    """The settings of a target that ``make fuzz`` gives all its inputs once more, and other runs a tenth of theirs."""
    return inputs(1 if INPUTS > 1000 else 0.1)


@contextlib.contextmanager
def survives(size: int) -> Iterator[None]:
    """Inside, an input of so many bytes is read: it may be refused by an error of ours whose message is one line."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"it takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    tracemalloc.start()
    try:
        yield
    except LowVRAMError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 2000, str(error)[:3000]
        str(error).encode()
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    WORST[test] = max(WORST.get(test, (0, 0)), (peak, size))
    assert peak <= 2 * size + ROOM, f"{peak} bytes were taken for a file of {size}"


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-3, 20),
    st.sampled_from([0, 1, 7, 8, 64, 512, 2**31, 2**32, 2**63, 2**64 - 1, 10**300]),
    st.floats(),
)
SIZES = st.one_of(
    st.text(max_size=30),
    st.builds(
        "{}{}{}".format,
        NUMBERS,
        st.sampled_from(["", " "]),
        st.sampled_from(["", "GB", "gib", "MB", "k", "B", "T", "٣"]),
    ),
    NUMBERS,
    st.booleans(),
)
WORDS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", " ", "\0", "\udcff", "a\nb", "../../x", "/dev/zero", "nan", "inf", "1e999", "=1+1", "x" * 70000, "٣"]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS.filter(math.isfinite), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes of ``whole``, cut, with other bytes in between, or with some changed."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        change = draw(st.sampled_from(["cut", "put", "set", "repeat", "number"]))
        if change == "cut":
            del data[at : at + draw(st.integers(0, 64))]
        elif change == "put":
            data[at:at] = draw(st.binary(max_size=16))
        elif change == "repeat":
            data[at:at] = data[at : at + 64] * draw(st.integers(1, 50))
        elif change == "number":
            data[at : at + 4] = struct.pack(draw(st.sampled_from(["<I", ">I"])), draw(st.integers(0, 2**32 - 1)))
        elif data:
            data[at] = draw(st.integers(0, 255))
    return bytes(data)


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    """Files of the format, or nearly."""
    names = st.sampled_from(
        [
            "model.diffusion_model.input_blocks.0.0.weight",
            "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
            "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias",
            "cond_stage_model.model.x", "first_stage_model.x", "__metadata__", "v_pred", "",
        ]
    )  # fmt: skip
    shapes = st.lists(st.sampled_from([0, 1, 4, 9, 768, 1024, 2048, 2**40, -1, 2**70, 1.5, "4", None]), max_size=5)
    table: dict = {}
    position = 0
    for name in draw(st.lists(names | st.text(max_size=8), max_size=6)):
        if draw(st.integers(0, 9)) == 0:
            table[name] = draw(JSON)
            continue
        shape = draw(shapes | st.sampled_from([[320, 4, 3, 3], [8, 1024], [8, 768], [2]]))
        end = position + draw(st.sampled_from([0, 2, 4, 8, 2**40]))
        if all(isinstance(side, int) for side in shape) and draw(st.booleans()):
            end = position + 2 * math.prod(shape)
        kind = draw(st.sampled_from(["F16", "F32", "BF16", "F4", "X", None, ["F16"]]))
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, end]}
        position = end if isinstance(end, int) and 0 <= end < 2**16 else position
    header = json.dumps(table).encode()
    length = draw(st.sampled_from([len(header), len(header), len(header), 0, 2**63, 2**64 - 1, len(header) + 1]))
    return struct.pack("<Q", length) + header + bytes(min(position, 1 << 16))


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_that_announces(length: int) -> bytes:
    """A PNG of one pixel whose data say that they are so long."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", length) + b"IDAT" + zlib.compress(bytes(4))


@st.composite
def pngs(draw: st.DrawFn) -> bytes:
    """PNG files that claim all sizes, with texts that unpack to more than they are."""
    side = st.sampled_from([0, 1, 8, 64, 13000, 20000, 2**31 - 1, 2**32 - 1])
    width, height = draw(side), draw(side)
    bits, colours = draw(st.sampled_from([(8, 2), (8, 6), (1, 0), (16, 6), (8, 3), (3, 7)]))
    header = struct.pack(">IIBBBBB", width, height, bits, colours, 0, 0, draw(st.sampled_from([0, 1])))
    texts = [
        chunk(b"tEXt", b"parameters\0" + draw(st.binary(max_size=40))),
        chunk(b"zTXt", b"parameters\0\0" + zlib.compress(bytes(draw(st.sampled_from([0, 100, 8_000_000]))))),
        chunk(b"iTXt", b"parameters\0\1\0\0\0" + zlib.compress(draw(st.text(max_size=40)).encode("utf-8", "replace"))),
        chunk(b"eXIf", b"MM\0*" + draw(st.binary(max_size=40))),
        chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1000))),
        chunk(draw(st.sampled_from([b"acTL", b"PLTE", b"fcTL", b"tRNS"])), draw(st.binary(max_size=30))),
    ]
    chosen = draw(st.lists(st.sampled_from(texts), max_size=3))
    size = (width * 3 + 1) * height
    rows = bytes(size if size <= 3 * 4096 + 64 else 100)
    body = b"".join([chunk(b"IHDR", header), *chosen, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])
    return b"\x89PNG\r\n\x1a\n" + body


@st.composite
def job_files(draw: st.DrawFn, columns: list[str]) -> tuple[str, bytes]:
    """A name, and jobs as people write them, or nearly."""
    names = draw(st.lists(st.sampled_from([*columns, "memory_plot", "widht", "Prompt", "--seed", ""]), max_size=6))
    cells = st.one_of(WORDS, SIZES.map(str), st.sampled_from(["a", "64", "true", "no", "exact", '"', "a,b", "x;y"]))
    form = draw(st.sampled_from(["csv", "jsonl", "txt"]))
    rows: list[str] = []
    if form == "csv":
        mark = draw(st.sampled_from([",", ";", "\t"]))
        rows.append(mark.join(["prompt", *names]))
        rows += [mark.join(draw(st.lists(cells, max_size=8))) for _ in range(draw(st.integers(0, 3)))]
    else:
        values = st.one_of(cells, JSON, NUMBERS)
        rows += [draw(WORDS) for _ in range(draw(st.integers(0, 2)))]
        for _ in range(draw(st.integers(0, 3))):
            table = {"prompt": "a"} | {name: draw(values) for name in names}
            rows.append(json.dumps(table))
        rows += ["[" * draw(st.sampled_from([0, 0, 100_000]))]
    end = draw(st.sampled_from(["\n", "\r\n", "\r", "\0", "\u2028"]))
    text = draw(st.sampled_from(["", "\ufeff"])) + end.join(rows)
    return f"jobs.{form}", text.encode(draw(st.sampled_from(["utf-8", "utf-8", "utf-16"])), "surrogatepass")
