"""The other kinds of checkpoints in a real WebUI, whose denoisers take more channels, other text or predict v.

WEBUI_DIR=... [WEBUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import webui_data
from test_webui import as_png, assert_same, difference, only_a1111, running
from webui_data import KIND, WEBUI
from webui_server import Made, Server

pytestmark = [pytest.mark.skipif(not WEBUI, reason="set WEBUI_DIR to a WebUI that runs"), pytest.mark.in_order]

KINDS = ("inpaint", "instruct", "sd2", "sd2v") if KIND == "a1111" else ("inpaint",)
SD2 = pytest.mark.serves("SD2.x, epsilon and v-prediction")
NINE = pytest.mark.serves("inpainting checkpoints with 9 channels")
INSTRUCT = pytest.mark.serves("InstructPix2Pix, 8 channels")
HALF = numpy.repeat(numpy.arange(128)[:, None, None] < 64, 128, 1) * numpy.full(3, 255, numpy.uint8)
FROM_A_PICTURE: dict[str, Any] = {"denoising_strength": 0.9, "steps": 3}

CASES = [
    pytest.param("inpaint", {}, marks=NINE),
    pytest.param("inpaint", FROM_A_PICTURE, marks=NINE),
    pytest.param("inpaint", {**FROM_A_PICTURE, "mask": as_png(Made([HALF], {})), "inpainting_fill": 1}, marks=NINE),
    pytest.param("instruct", {**FROM_A_PICTURE, "image_cfg_scale": 1.5}, marks=[INSTRUCT, only_a1111]),
    pytest.param("instruct", {**FROM_A_PICTURE, "image_cfg_scale": 1.0}, marks=[INSTRUCT, only_a1111]),
    pytest.param("sd2", {}, marks=[SD2, only_a1111]),
    pytest.param("sd2v", {}, marks=[SD2, only_a1111]),
    pytest.param("sd2v", FROM_A_PICTURE, marks=[SD2, only_a1111]),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data: Path = webui_data.empty(tmp_path_factory.mktemp("kinds"))
    webui_data.add_extension(data)
    for kind in ("first", *KINDS):
        webui_data.add_checkpoint(data, kind, kind="sd15" if kind == "first" else kind)
    with running(data) as s:
        yield s


@pytest.fixture(scope="module")
def start(server: Server) -> Made:
    return server.make()


@pytest.mark.parametrize(("kind", "asked"), CASES)
@pytest.mark.parametrize("preset", ["exact", "smallest"])
def test_the_picture_is_the_same_for_every_kind(
    server: Server, start: Made, kind: str, asked: dict[str, Any], preset: str
) -> None:
    """Its rows and channels are foreseen: it is planned once."""
    what = "img2img" if asked else "txt2img"
    asked = {**asked, "override_settings": {"sd_model_checkpoint": f"{kind}.safetensors"}}
    asked |= {"init_images": [as_png(start)]} if what == "img2img" else {}
    server.make(what, **asked)  # the host draws what it encodes from random numbers that go on from the picture before
    plain, before = server.make(what, **asked), len(server.plans())
    assert_same(server.make(what, ours={"preset": preset}, **asked), plain)
    assert len(server.plans()) == before + 1 and server.sites()["attention"] == 34
    assert difference(plain, start)[1] > 0.5
