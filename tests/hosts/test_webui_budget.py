"""Budgets in a real WebUI, beside an independent counter: the allocator's events of every step and every decode.

WEBUI_DIR=... [WEBUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import webui_data
from test_webui import assert_same, only_a1111
from webui_data import KIND, MODELS, PYTHON, WEBUI
from webui_server import Server, serving

pytestmark = pytest.mark.skipif(not WEBUI, reason="set WEBUI_DIR to a WebUI that runs")

MIB = 1 << 20
SIZE = {"width": 256, "height": 256}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with our extension, and the script that watches."""
    place = webui_data.empty(tmp_path_factory.mktemp("budget"))
    webui_data.add_extension(place)
    webui_data.add_script(place, "webui_watch.py")
    return place


def running(data: Path, name: str, *flags: str) -> Any:
    return serving(Path(WEBUI), PYTHON, data, "--ckpt", str(data / MODELS / f"{name}.safetensors"), *flags)


@pytest.fixture(scope="module")
def sdxl(data: Path) -> Iterator[Server]:
    """A narrow SDXL base, with a refiner of another configuration at hand."""
    for kind in ("base", "refiner"):
        webui_data.add_checkpoint(data, kind, seed=3, kind=kind)
    with running(data, "base") as s:
        s.ask("/sdapi/v1/options", {"live_previews_enable": False})  # else it downloads a small VAE for them
        yield s


@only_a1111
def test_base_and_refiner_keep_the_budget(sdxl: Server) -> None:
    asked: dict[str, Any] = {"refiner_checkpoint": "refiner", "refiner_switch_at": 0.5, "steps": 4, **SIZE}
    plain = sdxl.make(**asked)
    bare = sdxl.watched()
    steps = [one["peak"] for one in bare if one["stage"] == "denoise"]
    held = max(one["held"] for one in bare)
    budget = held + int(0.6 * min(steps[0], steps[-1]))
    before = len(sdxl.plans())
    ours = sdxl.make(ours={"offload": "none", "vram": f"{budget // MIB}MB"}, **asked)
    assert_same(ours, plain)
    base, refiner = (sdxl.sites(line) for line in sdxl.plans()[before:])
    assert len(base) > 1 and len(refiner) > 1, (base, refiner)
    now = sdxl.watched()[len(bare) :]
    assert [one["stage"] for one in now] == [one["stage"] for one in bare]
    assert all(one["peak"] + held <= budget for one in now), (budget, now)
    assert any(one["peak"] + held > budget for one in bare)


NARROWER = {"a1111": [("fp8",)], "forge": [("--unet-in-fp16",), ("--unet-in-fp8-e4m3fn",)]}
"""Ways to store the UNet's weights in a narrower type than it computes in: a setting, or flags of the host."""


@pytest.fixture(scope="module", params=NARROWER.get(KIND, []), ids=" ".join)
def narrower(data: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    if not (data / MODELS / "first.safetensors").exists():
        webui_data.add_checkpoint(data, "first")
    flags = request.param if KIND != "a1111" else ("--disable-nan-check",)
    with running(data, "first", *flags) as s:
        s.ask("/sdapi/v1/options", {"live_previews_enable": False})
        if KIND == "a1111":
            s.ask("/sdapi/v1/options", {"fp8_storage": "Enable"})
        yield s


@pytest.mark.parametrize("preset", ["exact", "smallest"])
def test_what_is_planned_is_of_the_type_that_computes(narrower: Server, preset: str) -> None:
    before = len(narrower.watched())
    narrower.make(ours={"preset": preset}, **SIZE)
    now = narrower.watched()[before:]
    assert [one["stage"] for one in now] == ["denoise", "denoise", "decode"]
    for one in now:
        assert one["peak"] <= 1.02 * one["planned"] + 2 * MIB, now
        assert one["planned"] <= 1.3 * one["peak"] + 2 * MIB, now
