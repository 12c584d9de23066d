"""Files of the cache that somebody has damaged or replaced: as if they were not there, whatever they hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hostile import JSON, WORDS, damaged, inputs, inputs_of_its_own, survives
from hypothesis import example, given
from hypothesis import strategies as st

from sd_lowvram import Settings, attached, cache
from sd_lowvram.commands import plan_cache
from sd_lowvram.devices import this_machine
from sd_lowvram.devices.performance import FETCH_ON_CPU, LAYER_ON_CPU, PROFILES
from sd_lowvram.hooks.replay.kept_traces import stored_trace

CPU = torch.device("cpu")
RATES = dataclasses.replace(PROFILES["t4"], name="this", layer_launches=LAYER_ON_CPU, fetch_launches=FETCH_ON_CPU)
ANSWER = {
    "fits": True,
    "request": {"vram": 1 << 30, "ram": 4 << 30},
    "reasons": ["needs 5 MiB of 1 GiB, most of it in decode"],
    "reason_values": [{"kind": "peak", "values": {"needed_bytes": 5 << 20, "vram": 1 << 30, "stage": "decode"}}],
}
ASKED = {"model": None, "vram": "1GB", "ram": "4GB", "gpu": "rtx2070"}
COLOURS = {"rows": [[0.1, 0.2, 0.3]] * 5, "explained": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SD_LOWVRAM_CACHE", str(place))
        patch.setattr(this_machine, "calibrate", lambda device: RATES)
        yield place


def facts() -> str:
    return "an autoencoder"


READERS: dict[str, tuple[Callable[[], Path | None], Callable[[], Any], Any]] = {
    "plans": (
        lambda: plan_cache._place(ASKED),
        lambda: plan_cache.cached_answer(ASKED, lambda budgets: (json.loads(json.dumps(ANSWER)), {})),
        ANSWER,
    ),
    "rates": (lambda: this_machine.place_of_measurement("rates", CPU), lambda: this_machine.rates_of(CPU), RATES),
    "previews": (
        lambda: cache.place_of("previews", facts),
        lambda: cache.recall(cache.place_of("previews", facts)) or COLOURS,
        COLOURS,
    ),
}
"""By what is cached: the place, what reads it or makes it anew, and what comes of that."""


@st.composite
def whole(draw: st.DrawFn) -> bytes:
    """Files as they are written, for another place."""
    value = draw(st.sampled_from([COLOURS, dataclasses.asdict(RATES), [{"alike": {}, "answer": ANSWER}]]))
    data = json.dumps(value).encode()
    return cache._head(Path("other.json"), data) + data + b"}"


CONTENTS = (
    damaged(whole())
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=200)
    | st.sampled_from([b"[" * 100_000, b'{"sha256": "', b"\xff\xfe", b" " * 5_000_000, b""])
)


@inputs_of_its_own()
@given(
    st.sampled_from(list(READERS)), CONTENTS, st.booleans(), st.sampled_from(["file"] * 9 + ["pipe", "link", "folder"])
)
@example("plans", b"[" * 1_000_000, False, "file")
@example("rates", b"", False, "pipe")
def test_what_is_cached(folder: Path, kind: str, content: bytes, of_its_own: bool, made: str) -> None:
    """The contents are those of a stranger, or the file's own with the contents put into them."""
    place, read, expected = READERS[kind]
    path = place()
    assert path is not None
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if made == "file":
        path.write_bytes(before[: len(before) // 2] + content + before[len(before) // 2 :] if of_its_own else content)
    elif made == "folder":
        path.mkdir()
    elif hasattr(os, "mkfifo"):
        os.mkfifo(path) if made == "pipe" else path.symlink_to("/dev/zero")
    with survives(len(content) + len(before)):
        assert read() == expected
        assert read() == expected


@pytest.fixture(scope="module")
def traced(folder: Path) -> tuple[Any, Path, bytes]:
    unet = tiny.tiniest().unet
    given = torch.ones(1, 4, 8, 8), torch.tensor(5), torch.ones(1, 7, unet.config.cross_attention_dim)
    with attached(unet, Settings(traced=True), device="cpu"), torch.inference_mode():
        for _ in range(3):
            unet(*given)
    (file,) = (folder / "traced").glob("*.pt")
    return unet, file, file.read_bytes()


@inputs(0.02)
@given(st.data())
def test_traces_that_are_kept(traced: tuple[Any, Path, bytes], data: Any) -> None:
    unet, file, content = traced
    changed = data.draw(damaged(st.just(content)) | WORDS.map(lambda text: text.encode("utf-8", "surrogatepass")))
    file.write_bytes(changed)
    with survives(2 * len(changed)):
        found = stored_trace(file, unet)
    assert found is None or zipfile.is_zipfile(file)
