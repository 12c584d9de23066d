"""What other extensions do next to our panel in a real WebUI, and what the line says of it while a picture is drawn.

WEBUI_DIR=... [WEBUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import webui_data
from test_webui import as_png, assert_same, difference, running
from webui_data import KIND, WEBUI
from webui_server import Made, RefusedError, Server

pytestmark = [pytest.mark.skipif(not WEBUI, reason="set WEBUI_DIR to a WebUI that runs"), pytest.mark.in_order]

LARGE = {"width": 512, "height": 512}
NOTHING = {"patched": 0, "watched": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = webui_data.empty(tmp_path_factory.mktemp("inside"))
    webui_data.add_extension(place)
    webui_data.add_script(place, "webui_inside.py", "a-first")  # its callbacks come before ours
    webui_data.add_checkpoint(place, "first")
    return place


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Server]:
    with running(data, *(["--skip-load-model-at-start"] if KIND == "a1111" else [])) as s:
        yield s


def make(server: Server, what: str = "txt2img", ours: Any = None, tiled: bool = False, **asked: Any) -> Made:
    """A picture, with what the extension is to do within it."""
    size = {name: asked.pop(name) for name in ("width", "height", "steps", "init_images") if name in asked}
    return server.make(what, ours=ours, alwayson_scripts={"inside": {"args": [tiled, asked]}}, **size)


def drawn(server: Server) -> list[tuple[int, bool]]:
    """The width of each step so far, and whether hooks of ours were there."""
    found = re.findall(r"^\[inside\] (\d+)x\d+ hooks (\d+)$", server.told(), re.MULTILINE)
    return [(int(width), int(hooks) > 0) for width, hooks in found]


class Line:
    """The panel's line as the page asks for it: with the values that it shows at first, but for those given."""

    def __init__(self, server: Server) -> None:
        self.server = server
        config = server.ask("/config")
        known = {one["id"]: one["props"] for one in config["components"]}
        ids = {props.get("elem_id"): one for one, props in known.items()}
        shown = [ids[f"txt2img_sd_lowvram_{name}"] for name in ("prediction", "verdict")]
        every = enumerate(config["dependencies"])
        asks = [(place, one) for place, one in every if one["outputs"] == shown and not one["js"]]
        assert [one["trigger_after"] is not None for _, one in asks[:2]] == [False, True]
        self.first, self.second = (one.get("id", place) for place, one in asks[:2])
        self.inputs = [known[one] for one in asks[0][1]["inputs"]]

    def ask(self, place: int, **values: Any) -> str:
        """Answer of ``place``; controls are named by the end of their ids."""
        sent = [self._value(props, values) for props in self.inputs]
        answer = self.server.ask("/run/predict", {"fn_index": place, "data": sent, "session_hash": "tests"})
        return str(answer["data"][0])

    @staticmethod
    def _value(props: dict[str, Any], values: dict[str, Any]) -> Any:
        named = (props.get("elem_id") or "").removesuffix("-checkbox")
        return next((value for name, value in values.items() if named.endswith(name)), props.get("value"))


ON = {"sd_lowvram_enabled": True, "sd_lowvram_vram": "16GB"}


def test_the_line_before_a_model_is_loaded_is_of_the_chosen_checkpoint_or_none(server: Server) -> None:
    line = Line(server)
    told = line.ask(line.first, **ON)
    assert re.search(r"\d+x\d+ fits|load a checkpoint", told) and "#c00" not in told
    assert not re.search(r"Fake|Model\b|Settings|=\w|\(\)", re.sub(r"<[^>]*>", "", told)), told


def test_the_line_says_at_once_that_a_picture_is_under_way(server: Server) -> None:
    """Answer for a new size; the second answer comes when the picture is there."""
    line = Line(server)
    with ThreadPoolExecutor(2) as waiting:
        made = waiting.submit(server.make, steps=6, width=256, height=256)
        while not re.search(r"^\[inside\] 256x256", server.told(), re.MULTILINE):
            assert not made.done()
        new = {**ON, "txt2img_width": 192, "txt2img_height": 320}
        assert "waits for the running picture" in line.ask(line.first, **new) and not made.done()
        assert "192x320 fits" in line.ask(line.second, **new) and made.done()


def test_a_run_that_raises_leaves_nothing_on_the_model(server: Server) -> None:
    server.make(ours={})
    assert server.ask("/tests/hooks") == NOTHING
    with pytest.raises(RefusedError, match="the sampling fails"):
        make(server, ours={}, raises=True)
    assert server.ask("/tests/hooks") == NOTHING


@pytest.mark.parametrize("where", ["detailer", "process_batch"])
def test_what_another_extension_draws_is_within_the_budget(server: Server, where: str) -> None:
    """A picture in a picture, both larger and with hooks, is as it is without ours."""
    plain = make(server, **{where: 192})
    begun, before = len(drawn(server)), len(server.told())
    ours = make(server, ours={"preset": "smallest"}, **{where: 192})
    assert_same(ours, plain)
    assert set(drawn(server)[begun:]) == {(128, True), (192, True)}
    assert "[sd-lowvram] 192x192, batch 1" in server.told()[before:]  # after the host's bar, perhaps in its line
    assert server.ask("/tests/hooks") == NOTHING
    if where == "detailer":
        assert difference(plain, server.make())[1] > 0.5


def least(server: Server, what: str = "txt2img", **asked: Any) -> int:
    """The MiB that a picture needs at least, by its refusal."""
    with pytest.raises(RefusedError) as refused:
        make(server, what, ours={"vram": "1MB"}, **asked)
    number, unit = re.findall(r"at least ([\d.]+) ([MG])iB", refused.value.text)[0]
    return int(float(number) * (1 if unit == "M" else 1024))


def test_what_does_not_fit_is_left_out_and_the_picture_comes(server: Server, data: Path) -> None:
    """The same picture alone is refused; latents that are saved outlive it."""
    plain = server.make()
    start = {"init_images": [as_png(plain)]}
    within, alone = least(server), least(server, "img2img", **LARGE, **start)
    budget = f"{(within + alone) // 2}MB"
    assert within + 4 < alone
    with pytest.raises(RefusedError, match="cannot hold"):
        make(server, "img2img", ours={"vram": budget}, **LARGE, **start)
    begun, before = len(drawn(server)), len(server.told())
    made = make(server, ours={"vram": budget, "save_latents": "keep"}, detailer=512)
    assert_same(made, plain)
    assert set(drawn(server)[begun:]) == {(128, True)}
    assert re.search(r"512x512 in this generation was refused: .* cannot hold", server.told()[before:])
    assert re.search("Low VRAM.*512x512", made.infotext)
    assert len([*data.rglob("*.latents.safetensors")]) == 1 and server.ask("/tests/hooks") == NOTHING


def test_another_tiled_vae_has_nothing_to_do_and_the_line_says_so(server: Server) -> None:
    told = "Tiled VAE, which is on too, has nothing to do: the decode is already exact and within the budget"
    plain, line = server.make(), Line(server)
    assert told in line.ask(line.first, **ON, **{"t2i-tiles": True}) and told not in line.ask(line.first, **ON)
    assert not numpy.array_equal(make(server, tiled=True).picture, plain.picture)
    before = len(server.told())
    assert "[inside] tiles decode" in server.told()
    assert_same(make(server, tiled=True, ours={}), plain)
    assert told in server.told()[before:] and "[inside] tiles decode" not in server.told()[before:]
