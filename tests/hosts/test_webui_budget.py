"""Budgets in a real WebUI, compared with an independent counter: the allocator's events of every step and every decode.

WEBUI_DIR=... [WEBUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_webui
import webui_data
from test_webui import HIRES, as_png, assert_same, only_a1111
from webui_data import KIND, MODELS, PYTHON, WEBUI
from webui_server import RefusedError, Server, serving

pytestmark = [pytest.mark.skipif(not WEBUI, reason="set WEBUI_DIR to a WebUI that runs"), pytest.mark.in_order]

MIB = 1 << 20
SIZE = {"width": 512, "height": 512}


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
    """A narrow SDXL base, with a refiner of another configuration at hand; steps take more than an exact decode."""
    for kind in ("base", "refiner"):
        webui_data.add_checkpoint(data, kind, seed=3, kind=kind, width=64)
    with running(data, "base") as s:
        s.ask("/sdapi/v1/options", {"live_previews_enable": False})  # else it downloads a small VAE for them
        yield s


WHOLE = {"offload": "none", "packed_weights": "off"}
"""Weights are given up for no budget, and need no memory besides, so that it must be found in the steps."""
VAE_AND_ATTENTION = {"attention", "vae_exact", "vae_slices"}
SWITCHED = {"refiner_checkpoint": "refiner", "refiner_switch_at": 0.5, "steps": 2}
REFINER = {"override_settings": {"sd_model_checkpoint": "refiner.safetensors"}, "steps": 1}


def check(watched: list[dict[str, Any]], steps: int) -> None:
    """What the counter saw is what was planned."""
    assert [one["stage"] for one in watched] == ["denoise"] * steps + ["decode"]
    for one in watched:
        assert one["peak"] - one["unfolded"] <= 1.02 * one["seen"] + 2 * MIB, watched
        assert one["seen"] <= 1.3 * one["peak"] + 2 * MIB, watched


@only_a1111
@pytest.mark.serves("SDXL refiner")
@pytest.mark.parametrize("asked", [SWITCHED, REFINER], ids=["base and refiner", "refiner"])
def test_sdxl_keeps_the_budget(sdxl: Server, asked: dict[str, Any]) -> None:
    """The budget is too small for plain steps of the model that holds more: the base, where it takes part."""
    start = len(sdxl.watched())
    plain = sdxl.make(**asked, **SIZE)
    bare = sdxl.watched()[start:]
    sdxl.make(ours=WHOLE, **asked, **SIZE)
    plenty = sdxl.watched()[start + len(bare) :]
    check(plenty, asked["steps"])
    budget = max(one["held"] for one in plenty) + int(0.9 * plenty[0]["planned"])
    before, lines = len(sdxl.watched()), len(sdxl.plans())
    ours = sdxl.make(ours={**WHOLE, "vram": f"{budget // MIB}MB"}, **asked, **SIZE)
    assert_same(ours, plain)
    now = sdxl.watched()[before:]
    check(now, asked["steps"])
    plans = sdxl.plans()[lines:]
    assert len(plans) == (2 if asked is SWITCHED else 1)
    sites = sdxl.sites(plans[0])
    print(f"{budget // MIB} MiB: {[sdxl.sites(line) for line in plans]}")
    assert sites["vae_exact"] == 2 and set(sites) - VAE_AND_ATTENTION, sites
    assert all(one["peak"] + one["held"] <= budget for one in now if one["stage"] == "denoise"), (budget, now)
    assert any(one["peak"] + one["held"] > budget for one in bare if one["stage"] == "denoise"), (budget, bare)


NARROWER = {
    "a1111": [("fp8",)],
    "forge": [("--unet-in-fp16",), ("--unet-in-fp8-e4m3fn",)],
    "neo": [("--fp16-unet",), ("--fp8_e4m3fn-unet",)],
}
"""Ways to store the UNet's weights in a narrower type than it computes in: a setting, or flags of the host."""


@pytest.fixture(scope="module", params=NARROWER.get(KIND, []), ids=" ".join)
def narrower(data: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    if not (data / MODELS / "first.safetensors").exists():
        webui_data.add_checkpoint(data, "first")
    flags = request.param if KIND != "a1111" else ("--disable-nan-check",)
    with test_webui.running(data, *flags) as s:
        s.ask("/sdapi/v1/options", {"live_previews_enable": False})
        if KIND == "a1111":
            s.ask("/sdapi/v1/options", {"fp8_storage": "Enable"})
        yield s


@pytest.mark.parametrize("preset", ["exact", "smallest"])
def test_what_is_planned_is_of_the_type_that_computes(narrower: Server, preset: str) -> None:
    before = len(narrower.watched())
    narrower.make(steps=1, ours={"preset": preset, "offload": "none"}, **SIZE)
    check(narrower.watched()[before:], 1)


RUN = [
    ("img2img", {"steps": 20, "denoising_strength": 0.75}),
    ("img2img", {"steps": 20, "denoising_strength": 0.1}),
    ("txt2img", {"steps": 4, **HIRES, "hr_second_pass_steps": 3}),
]


@pytest.mark.parametrize(("what", "asked"), RUN)
def test_the_steps_that_are_planned_are_those_that_run(narrower: Server, what: str, asked: dict[str, Any]) -> None:
    """Those of each pass, where there are two."""
    small = {"width": 64, "height": 64}
    start = {"init_images": [as_png(narrower.make(steps=1, **small))]} if what == "img2img" else {}
    before = len(narrower.watched())
    narrower.make(what, ours={}, **asked, **start, **small)
    ran = Counter(one["steps"] for one in narrower.watched()[before:] if one["stage"] == "denoise")
    assert ran and all(steps == count for steps, count in ran.items()) and len(ran) == (1 if start else 2)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place: Path = webui_data.empty(tmp_path_factory.mktemp("flux"))
    webui_data.add_extension(place)
    webui_data.add_script(place, "webui_watch.py")
    webui_data.add_checkpoint(place, "first", kind="flux")
    with test_webui.running(place) as s:
        s.ask("/sdapi/v1/options", {"live_previews_enable": False})
        yield s


@pytest.mark.skipif(KIND != "neo", reason="only Forge Neo's FLUX is tried")
@pytest.mark.serves("FLUX.1")
def test_flux_is_counted_and_its_picture_is_the_same(flux: Server) -> None:
    asked = {**SIZE, "steps": 2, "cfg_scale": 1}
    plain, whole = flux.make(**asked), flux.watched()[-1]
    before = len(flux.watched())
    assert_same(flux.make(ours={"vram": "200MB"}, **asked), plain)
    check(flux.watched()[before:], 2)
    assert "MiB, more than this budget" in flux.plans()[-1]  # on a CPU, where Forge Neo keeps all weights
    assert flux.sites()["vae_exact"] == 2 and flux.watched()[-1]["peak"] < 0.6 * whole["peak"]
    budget, before = whole["held"] + int(0.8 * whole["peak"]), len(flux.watched())  # too little for a whole decode
    assert_same(flux.make(ours={"vram": f"{budget} b"}, **asked), plain)
    check(flux.watched()[before:], 2)
    assert "more than this budget" not in flux.plans()[-1] and flux.sites()["vae_exact"] == 2
    assert all(one["held"] + one["peak"] <= budget for one in flux.watched()[before:])
    for more in ({}, {"prompt": "a red cube on a table " * 60}):  # of more tokens than are assumed
        before, lines = len(flux.watched()), len(flux.plans())
        ours = flux.make(ours={"preset": "smallest"}, **asked, **more)
        check(flux.watched()[before:], 2)
        plans = flux.plans()[lines:]
        assert len(plans) == (2 if more else 1) and "the steps run as in the WebUI and are counted" in plans[-1]
        assert flux.sites()["vae_exact"] == 2 and "feed_forward" not in flux.sites()
        if not more:
            assert_same(ours, plain)
    with pytest.raises(RefusedError, match="at least"):
        flux.make(ours={"vram": "20MB"}, **asked)
