"""Our panel in a real WebUI on the CPU, over its HTTP API, with a narrow SD1.5 of random weights or a model of yours.

    WEBUI_DIR=... [WEBUI_PYTHON=...] [WEBUI_CHECKPOINT=...] make test-hosts

The environment of WEBUI_PYTHON has what the WebUI needs (by default WEBUI_DIR/venv); offline, HF_HOME names a cache
that holds CLIP's tokenizer. reForge knows a model by its widths, so its model is of full size.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import webui_data
from command_line import call
from PIL import Image
from webui_data import KIND, PYTHON, WEBUI
from webui_server import NAME, Made, RefusedError, Server, serving

from webui_ext.arguments import arguments

pytestmark = [pytest.mark.skipif(not WEBUI, reason="set WEBUI_DIR to a WebUI that runs"), pytest.mark.in_order]

only_a1111 = pytest.mark.skipif(KIND != "a1111", reason="Forge moves weights itself and has attention of its own")

UNET_ATTENTIONS, VAE_ATTENTIONS, RESIDUAL_BLOCKS = 32, 2, 22


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two checkpoints and without our extension."""
    folder, given = webui_data.empty(tmp_path_factory.mktemp("webui")), os.environ.get("WEBUI_CHECKPOINT")
    if given:
        (folder / webui_data.MODELS / "first.safetensors").symlink_to(Path(given).resolve())
    else:
        webui_data.add_checkpoint(folder, "first")
    webui_data.add_checkpoint(folder, "second", seed=1)
    return folder


def packages() -> str:
    return subprocess.run([PYTHON, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def running(data: Path, *flags: str) -> Iterator[Server]:
    first = data / webui_data.MODELS / "first.safetensors"
    named = ["--ckpt-dirs", str(first.parent)] if KIND == "neo" else ["--ckpt", str(first)]
    with serving(Path(WEBUI), PYTHON, data, *named, *flags) as server:
        if KIND == "neo":  # which starts with any
            server.ask("/sdapi/v1/options", {"sd_model_checkpoint": first.name})
        yield server


@pytest.fixture(scope="module")
def bare(data: Path) -> dict[str, Any]:
    """What the host makes, and has installed, without us."""
    with running(data) as s:
        return {"picture": s.make().picture, "packages": packages()}


LEFT_OVERS: dict[str, Any] = {"token_merging_ratio": 0.5}
if KIND == "a1111":  # Forge has no hypertile
    LEFT_OVERS |= {"hypertile_enable_unet": True, "hypertile_enable_vae": True}


@pytest.fixture(scope="module")
def server(data: Path, bare: dict[str, Any]) -> Iterator[Server]:
    """All plans are made anew, and after other extensions have left things of theirs on the model."""
    webui_data.add_extension(data)
    with running(data) as s:
        s.ask("/sdapi/v1/options", LEFT_OVERS)
        merged = s.make().picture
        s.ask("/sdapi/v1/options", {name: type(value)(0) for name, value in LEFT_OVERS.items()})
        assert not numpy.array_equal(merged, bare["picture"]) and not any((data / "traces").glob("*"))
        yield s


def difference(one: Made, other: Made) -> tuple[int, float]:
    """The largest difference in steps of 255, and the share of pixels off by more than one."""
    off = numpy.abs(one.picture.astype(int) - other.picture.astype(int)).max(-1)
    return int(off.max()), float((off > 1).mean())


def assert_same(one: Made, other: Made) -> None:
    assert difference(one, other)[1] <= 0.001
    assert one.picture.std() > 5  # a grey picture would be equal to any other


def test_it_loads_without_a_word_of_complaint(server: Server) -> None:
    assert NAME in server.ask("/sdapi/v1/scripts")["txt2img"] and NAME in server.ask("/sdapi/v1/scripts")["img2img"]
    assert "Traceback" not in server.told() and "***" not in server.told()


def test_this_version_is_the_one_that_is_listed(server: Server) -> None:
    """Another one is not wrong: add it to tried.json when its tests have passed."""
    named = {"a1111": "AUTOMATIC1111", "forge": "Forge", "neo": "Forge Neo", "reforge": "reForge"}[KIND]
    tried = json.loads((Path(__file__).parent / "tried.json").read_text(encoding="utf-8"))
    listed = next(one["version"] for one in tried if one["host"] == named)
    version = str(server.make().info["version"])
    if listed not in version:
        pytest.skip(f"{named} {version} is not the listed {listed}")


def test_off_means_off(server: Server, bare: dict[str, Any]) -> None:
    assert numpy.array_equal(server.make().picture, bare["picture"])
    server.make(ours={"preset": "smallest"})
    assert numpy.array_equal(server.make().picture, bare["picture"])
    assert packages() == bare["packages"]


@pytest.mark.serves("SD1.x, SDXL: txt2img, img2img, inpainting with 4 channels")
@pytest.mark.parametrize("preset", ["exact", "exact and fastest", "smallest"])
def test_the_picture_is_the_same(server: Server, preset: str) -> None:
    ours = server.make(ours={"preset": preset})
    assert_same(ours, server.make())
    sites = server.sites()
    assert sites["attention"] == UNET_ATTENTIONS + VAE_ATTENTIONS
    assert sites.get("residual_strips", 0) == (RESIDUAL_BLOCKS if preset == "smallest" else 0)


def test_latents_are_saved_first_and_decoded_without_the_host(server: Server, data: Path) -> None:
    def files() -> set[Path]:
        return set(data.rglob("*.latents.safetensors"))

    for choice in ("until decoded", "keep"):
        seen: set[Path] = set()
        with ThreadPoolExecutor(1) as waiting:
            asked = waiting.submit(server.make, ours={"preset": "exact", "save_latents": choice})
            while not asked.done():
                seen |= files()
                time.sleep(0.02)
        made = asked.result()
        assert len(seen) == 1 and len(files()) == (choice == "keep")
    [kept] = files()
    done = call("resume", kept.name, folder=kept.parent)
    assert done.returncode == 0, done.stderr
    with Image.open(kept.with_name(kept.name.replace(".latents.safetensors", ".png"))) as picture:
        away = numpy.abs(numpy.asarray(picture.convert("RGB")).astype(int) - made.picture.astype(int)).max(-1)
        assert picture.info["parameters"].startswith(made.infotext.split("\n")[0])
    assert not kept.exists() and (away > 1).mean() <= 0.001


def test_the_positional_list_does_the_same(server: Server) -> None:
    listed = server.make(ours=[True, "16GB", "", "exact", "auto", "sliced"])
    assert numpy.array_equal(listed.picture, server.make(ours={"attention": "sliced"}).picture)


def test_settings_are_the_defaults_of_calls(server: Server) -> None:
    page = str(server.ask("/config"))
    assert all(f"Default of {one.label}" in page for one in arguments())
    try:
        server.ask("/sdapi/v1/options", {"sd_lowvram_attention": "sliced"})
        assert "Low VRAM: vram 16GB | attention sliced" in server.make(ours={}).infotext
    finally:
        server.ask("/sdapi/v1/options", {"sd_lowvram_attention": "auto"})
    assert "sliced" not in server.make(ours={}).infotext


def test_infotext_brings_the_arguments_back(server: Server) -> None:
    made = server.make(ours={"attention": "sliced", "vae_tiles": "exact", "vae_strip_mib": 2})
    assert "Low VRAM: vram 16GB | attention sliced | vae_tiles exact | vae_strip_mib 2" in made.infotext
    again = server.make(infotext=made.infotext, styles=[])  # Forge fails on infotext that leaves styles to it
    assert again.infotext == made.infotext and numpy.array_equal(again.picture, made.picture)


REFUSED: list[Any] = [
    ({"vrom": "4GB"}, "'vram'"),
    ([[True]], "one flat list"),
    ({"precision": "tf32"}, "NVIDIA"),
    ({"largest_mib": 1}, "Largest piece of memory.* 1: "),
    pytest.param({"vram": "20MB"}, r"cannot hold .* at least .*\. Give that much\"", marks=only_a1111),
    pytest.param({"weights_mib": 1}, "Model in VRAM, up to.* 1: ", marks=only_a1111),
    pytest.param({"precision": "fp16"}, "cannot compute in fp16 on a CPU", marks=only_a1111),
]


@pytest.mark.parametrize(("wrong", "says"), REFUSED)
def test_what_cannot_be_is_refused_with_the_limit_in_question(server: Server, wrong: Any, says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        server.make(ours=wrong)
    assert refused.value.status == 422 and "16 GiB" not in refused.value.text
    server.make()


@pytest.mark.skipif(KIND not in ("forge", "neo"), reason="AUTOMATIC1111 leaves the weights to the plan")
def test_a_budget_that_the_host_does_not_keep_is_told(server: Server) -> None:
    """Its UNet alone has 39.5 MiB, and it keeps all of the model on a CPU."""
    for budget, kept in (("20MB", False), ("16GB", True)):
        made = server.make(ours={"vram": budget})
        assert "it keeps all " in server.plans()[-1] and "peak" not in server.plans()[-1]
        assert ("more than this budget" in server.plans()[-1]) != kept
        assert ("Low VRAM budget: exceeded by the WebUI" in made.infotext) != kept


@pytest.mark.serves("LCM, Turbo, Lightning")
@pytest.mark.parametrize("prompt", ["a red cube", "a red cube AND a blue ball"])
@pytest.mark.parametrize("scale", [1, 5])
def test_every_guidance_is_planned_once(server: Server, prompt: str, scale: float) -> None:
    """AUTOMATIC1111 runs both halves at a scale of 1, and more rows for the parts between ANDs."""
    asked = {"cfg_scale": scale, "prompt": prompt}
    before = len(server.plans())
    ours = server.make(ours={"preset": "smallest"}, **asked)
    assert len(server.plans()) == before + 1
    assert_same(ours, server.make(**asked))


def test_sides_that_are_no_multiple_of_8(server: Server) -> None:
    sides = {"width": 139, "height": 101}
    plain = server.make(**sides)
    assert_same(server.make(ours={"vae_tiles": "exact"}, **sides), plain)
    start = {"init_images": [as_png(plain)], "denoising_strength": 0.6, **sides}
    assert_same(server.make("img2img", ours={"vae_tiles": "exact"}, **start), server.make("img2img", **start))


def as_png(made: Made) -> str:
    buffer = io.BytesIO()
    Image.fromarray(made.picture).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.skipif(KIND == "neo", reason="Forge Neo has no refiner until a setting shows it")
@pytest.mark.serves("SDXL refiner")
def test_a_refiner_is_planned_and_attached_at_the_switch(server: Server) -> None:
    asked: dict[str, Any] = {"refiner_checkpoint": "second", "refiner_switch_at": 0.5, "steps": 4}
    before = len(server.plans())
    ours = server.make(ours={"preset": "smallest"}, **asked)
    base, refiner = (server.sites(line) for line in server.plans()[before:])
    assert base == refiner and refiner["residual_strips"] == RESIDUAL_BLOCKS and refiner["vae_exact"] == 2
    assert_same(ours, server.make(**asked))
    assert difference(ours, server.make(steps=4))[1] > 0.5


PREVIEWED = ({"preset": "smallest"}, {"preset": "smallest"} if KIND != "a1111" else {"weights_mib": 10})


@pytest.mark.parametrize("ours", PREVIEWED, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize(
    ("kind", "generations"), [("Full", 10), *([("Approx NN", 2)] if webui_data.has_approximation() else [])]
)
def test_live_previews_decode_beside_the_steps(
    server: Server, kind: str, generations: int, ours: dict[str, Any]
) -> None:
    """The generations are looked at all the while from another thread, which has the host decode."""
    server.ask("/sdapi/v1/options", {"show_progress_type": kind, "show_progress_every_n_steps": 1})
    plain = server.make(steps=4)
    with looked_at(server) as seen:
        for _ in range(generations):
            assert_same(server.make(steps=4, ours=ours), plain)
    assert len(seen) >= generations and len(set(seen)) > 1


@contextlib.contextmanager
def looked_at(server: Server) -> Iterator[list[str]]:
    """Within the block the page's picture of what is being made is asked for again and again; a picture counts when it
    is another than before."""
    seen: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            picture = server.ask("/sdapi/v1/progress")["current_image"]
            if picture and [picture] != seen[-1:]:
                seen.append(picture)

    with ThreadPoolExecutor(1) as other:
        looking = other.submit(look)
        try:
            yield seen
        finally:
            done.set()
        looking.result()


def test_grid_over_attention_backends(server: Server) -> None:
    labels = ["Nothing", "[Low VRAM] Attention"]
    axes = _grid_axes(server)
    assert labels[1] in axes
    backends = ["sdpa", "sliced", "fused-softmax"]
    values = [axes.index(labels[1]), "", backends, 0, "", [], 0, "", []]
    legend, lone = True, False
    made = server.make(script_name="x/y/z plot", script_args=[*values, legend, lone, *_GRID, False])
    assert len(made.pictures) == 1 and made.picture.shape[1] >= 3 * 128
    told = "\n".join(map(str, made.info["infotexts"]))
    assert all(f"Low VRAM: attention {backend}" in told for backend in backends)
    log = server.told().splitlines()
    lines = [line for line in log if line.startswith(f"[{NAME}]")][-len(backends) :]
    assert all("attention 34" in line for line in lines)


def test_a_refused_picture_of_a_grid_says_why_in_its_place(server: Server) -> None:
    """The other keeps its place, and the host goes on."""
    label = next(axis for axis in _grid_axes(server) if axis.startswith("[Low VRAM] Largest piece"))
    values = [_grid_axes(server).index(label), "1, 0", [], 0, "", [], 0, "", []]
    legend, lone = True, True
    made = server.make(script_name="x/y/z plot", script_args=[*values, legend, lone, *_GRID, True])
    _, refused, drawn = made.pictures
    assert any('"Largest piece of memory" 1: ' in str(text) for text in made.info["infotexts"])
    assert refused.shape == (128, 128, 3) and (refused == 255).all(-1).mean() > 0.4 and refused.std() > 5
    assert numpy.array_equal(drawn, server.make(ours={"largest_mib": 0, "vram": ""}).picture)


def test_the_page_asks_nothing_while_the_panel_is_off(server: Server) -> None:
    """Gradio runs a script before it asks, where one is given; only the panel's own switch has none."""
    config = server.ask("/config")
    ids = {one["props"].get("elem_id"): one["id"] for one in config["components"]}
    for tab in ("txt2img", "img2img"):
        shown = [ids[f"{tab}_sd_lowvram_{name}"] for name in ("prediction", "verdict")]
        ours = [one for one in config["dependencies"] if one["outputs"] == shown]
        free = [one["targets"] for one in ours if not one["js"] and one["trigger_after"] is None]
        assert len(ours) > 30 and all("new Promise" in one["js"] for one in ours if one["js"])
        assert str(ids[f"{tab}_sd_lowvram_enabled-checkbox"]) in map(str, numpy.ravel(free[0])) and len(free) == 1


_GRID = [*[False] * 5, *([0] if KIND == "neo" else []), 0]
"""The grid's parts, seeds, varied axes, rows (in Forge Neo) and margin; what follows says if values are a text."""


def _grid_axes(server: Server) -> list[str]:
    info = server.ask("/sdapi/v1/script-info")
    grid = next(one for one in info if one["name"] == "x/y/z plot" and not one["is_img2img"])
    return list(grid["args"][0]["choices"])


UPSCALERS = ["None"] if KIND == "neo" else ["Latent", "Lanczos"]  # Forge Neo has no others
HIRES: dict[str, Any] = {"enable_hr": True, "hr_scale": 2, "hr_upscaler": UPSCALERS[0], "denoising_strength": 0.7}
if KIND != "a1111":  # its page sends these along, and its API has no default that works
    HIRES |= {"hr_additional_modules": ["Use same choices"], "hr_cfg": 5}


@pytest.mark.parametrize("upscaler", UPSCALERS)
def test_hires_fix_is_planned_anew(server: Server, upscaler: str) -> None:
    hires = {**HIRES, "hr_upscaler": upscaler}
    ours = server.make(ours={"preset": "smallest"}, **hires)
    assert_same(ours, server.make(**hires))
    assert ours.picture.shape == (256, 256, 3)


@pytest.mark.serves("SD1.x, SDXL: txt2img, img2img, inpainting with 4 channels")
def test_img2img(server: Server) -> None:
    start = {"init_images": [as_png(server.make())], "denoising_strength": 0.6}
    ours = server.make("img2img", ours={"vae_tiles": "exact"}, **start)
    assert server.sites()["vae_exact"] == 2
    assert_same(ours, server.make("img2img", **start))


def test_batches(server: Server) -> None:
    ours = server.make(ours={"preset": "smallest"}, batch_size=2, n_iter=2)
    plain = server.make(batch_size=2, n_iter=2)
    assert len(ours.pictures) == len(plain.pictures) >= 4
    for one, other in zip(ours.pictures, plain.pictures, strict=True):
        assert numpy.abs(one.astype(int) - other.astype(int)).max() <= 1


def test_another_checkpoint(server: Server) -> None:
    second = {"override_settings": {"sd_model_checkpoint": "second.safetensors"}}
    ours = server.make(ours={"preset": "smallest"}, **second)
    assert_same(ours, server.make(**second))
    assert difference(ours, server.make())[1] > 0.5
    server.make(ours={})


def test_decoder_on_the_cpu(server: Server) -> None:
    on_cpu = server.make(ours={"decoder_device": "cpu"})
    assert_same(on_cpu, server.make(ours={"decoder_device": "gpu"}))


def test_deterministic_in_two_processes(server: Server, data: Path) -> None:
    asked = {"deterministic": True, "preset": "exact and fastest"}
    first = server.make(ours=asked)
    with running(data) as s:
        assert numpy.array_equal(s.make(ours=asked).picture, first.picture)


@only_a1111
@pytest.mark.serves("LoRA")
@pytest.mark.parametrize("prompt", ["a red cube", "a red cube <lora:first:1>"])
def test_a_quarter_of_the_weights_on_the_device(server: Server, prompt: str) -> None:
    plain = server.make(prompt=prompt, ours={})
    streamed = server.make(prompt=prompt, ours={"weights_mib": _quarter(server)})
    assert server.sites()["offload"] > 100
    assert numpy.array_equal(streamed.picture, plain.picture)
    assert numpy.array_equal(server.make(prompt=prompt, ours={}).picture, plain.picture)
    if "lora" in prompt and "WEBUI_CHECKPOINT" not in os.environ:
        assert difference(plain, server.make(ours={}))[1] > 0.5


def _quarter(server: Server) -> int:
    """A quarter of what the UNet holds in float32: 3279 MiB of SD1.5, a hundredth of it when it is narrow."""
    return 820 if "WEBUI_CHECKPOINT" in os.environ else 10


@only_a1111
def test_our_backends_among_the_hosts_optimisations(server: Server) -> None:
    plain = server.make()
    titles = re.findall(r"low-vram [a-z-]+ - [^\"\\]+", str(server.ask("/config")))
    assert any(title.startswith("low-vram fused-softmax") for title in titles)
    before = server.ask("/sdapi/v1/options")["cross_attention_optimization"]
    try:
        server.ask("/sdapi/v1/options", {"cross_attention_optimization": _title(titles, "fused-softmax")})
        assert_same(server.make(), plain)
        assert "Applying attention optimization: low-vram fused-softmax" in server.told()
    finally:
        server.ask("/sdapi/v1/options", {"cross_attention_optimization": before})


def _title(titles: list[str], backend: str) -> str:
    return next(title for title in titles if title.startswith(f"low-vram {backend} ")).split("'")[0]


def test_nothing_was_reported_on_the_way(server: Server) -> None:
    """Runs last: all that went on above left no traceback."""
    assert "Traceback" not in server.told()


@only_a1111
def test_weights_that_the_host_moves_by_blocks(server: Server, data: Path) -> None:
    """The UNet's weights, 39.5 MiB, would break this budget; one block of them at a time does not."""
    with running(data, "--lowvram") as s:
        ours = s.make(ours={"vram": "38MB"})
        assert "the WebUI fetches layers" in s.plans()[-1]
        assert_same(ours, s.make())
        with pytest.raises(RefusedError, match="decode needs at least"):
            s.make(ours={"vram": "20MB"})


@only_a1111
def test_weights_of_8_bits(server: Server, data: Path) -> None:
    with running(data, "--disable-nan-check") as s:
        s.make()
        s.ask("/sdapi/v1/options", {"fp8_storage": "Enable"})
        try:
            for preset in ("exact", "smallest"):
                s.make(ours={"preset": preset})
        finally:
            s.ask("/sdapi/v1/options", {"fp8_storage": "Disable"})
