"""Our nodes in a real ComfyUI on the CPU, full-size SD1.5 with random weights, over HTTP.

    COMFYUI_DIR=... [COMFYUI_PYTHON=...] [COMFYUI_CHECKPOINT=...] make test-hosts

The environment of COMFYUI_PYTHON has what ComfyUI needs. Without a checkpoint one with random weights is written.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import random_checkpoint
import torch
from comfyui_server import PACK, Prompt, RunError, Server, serving, to_prompt
from command_line import call
from PIL import Image
from safetensors.torch import save_file

from sd_lowvram.units import parse_size

COMFYUI = os.environ.get("COMFYUI_DIR")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
ROOT = Path(__file__).parents[2]
SIZE = int(os.environ.get("COMFYUI_SIZE", "256"))
NAME, LORA = "sd-lowvram-test.safetensors", "sd-lowvram-test-lora.safetensors"
TITLES = {
    "LowVRAM": "Low VRAM",
    "LowVRAMSettings": "Low VRAM Settings",
    "LowVRAMVAEDecode": "VAE Decode (low VRAM)",
    "LowVRAMVAEEncode": "VAE Encode (low VRAM)",
    "LowVRAMPlan": "Plan (low VRAM)",
    "LowVRAMReport": "Report (low VRAM)",
}

pytestmark = [pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_DIR to a ComfyUI that runs"), pytest.mark.in_order]

CHUNKED = {
    "attention": "sdpa",
    "residual_strips": 4,
    "feed_forward_chunks": 4,
    "transformer_chunks": 2,
    "park_skips": "on",
    "guidance_in_turn": "on",
}


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> Iterator[Path]:
    """The host with our pack linked, a checkpoint and a LoRA; all are taken away afterwards."""
    assert COMFYUI is not None
    host, made = Path(COMFYUI).resolve(), []
    checkpoint = os.environ.get("COMFYUI_CHECKPOINT")
    if checkpoint is None:
        checkpoint = str(tmp_path_factory.mktemp("checkpoint") / NAME)
        random_checkpoint.write("sd15", checkpoint)
    lora = tmp_path_factory.mktemp("lora") / LORA
    save_file(lora_weights(), str(lora))
    links = (
        (host / "custom_nodes" / PACK, ROOT),
        (host / "models" / "checkpoints" / NAME, Path(checkpoint)),
        (host / "models" / "loras" / LORA, lora),
    )
    try:
        for place, target in links:
            place.unlink(missing_ok=True)
            place.symlink_to(target)
            made.append(place)
        yield host
    finally:
        for place in made:
            place.unlink()


@pytest.fixture(scope="module")
def server(host, tmp_path_factory) -> Iterator[Server]:
    frozen = installed()
    with serving(host, PYTHON, tmp_path_factory.mktemp("comfyui"), "--use-pytorch-cross-attention") as server:
        yield server
    assert installed() == frozen


def installed() -> str:
    return subprocess.run([PYTHON, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout


def lora_weights() -> dict[str, torch.Tensor]:
    """A LoRA of rank 4 on attentions, a feed-forward and a convolution of the UNet, strong enough to be seen."""
    noise = torch.Generator().manual_seed(5)
    block = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0"
    layers = {
        f"{block}_attn1_to_q": (320, 320),
        f"{block}_attn1_to_out_0": (320, 320),
        f"{block}_attn2_to_v": (320, 768),
        f"{block}_ff_net_2": (320, 1280),
    }
    weights: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in layers.items():
        weights[f"{name}.lora_down.weight"] = torch.randn(4, columns, generator=noise) * columns**-0.5
        weights[f"{name}.lora_up.weight"] = torch.randn(rows, 4, generator=noise)
        weights[f"{name}.alpha"] = torch.tensor(4.0)
    convolution = "lora_unet_down_blocks_0_resnets_0_conv1"
    weights[f"{convolution}.lora_down.weight"] = torch.randn(4, 320, 3, 3, generator=noise) / 54
    weights[f"{convolution}.lora_up.weight"] = torch.randn(320, 4, 1, 1, generator=noise)
    weights[f"{convolution}.alpha"] = torch.tensor(4.0)
    return weights


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def prompt(size: int = SIZE, seed: int = 42, steps: int = 2) -> Prompt:
    """The stock txt2img workflow; node 5 samples, node 7 saves."""
    sampler = {"steps": steps, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    wired = {"model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    return {
        "1": node("CheckpointLoaderSimple", ckpt_name=NAME),
        "2": node("CLIPTextEncode", text="a photo of a cat", clip=["1", 1]),
        "3": node("CLIPTextEncode", text="blurry", clip=["1", 1]),
        "4": node("EmptyLatentImage", width=size, height=size, batch_size=1),
        "5": node("KSampler", seed=seed, **sampler, **wired),
        "6": node("VAEDecode", samples=["5", 0], vae=["1", 2]),
        "7": node("SaveImage", images=["6", 0], filename_prefix="stock"),
    }


def optimized(made: Prompt, model: str = "1", budget: str = "", **knobs: Any) -> Prompt:
    """``made`` with our node before the sampler; its VAE is not used."""
    made["10"] = node("LowVRAM", model=[model, 0], vae=["1", 2], budget=budget, **chosen(made, "100", **knobs))
    made["5"]["inputs"]["model"] = ["10", 0]
    return made


def chosen(made: Prompt, number: str, **knobs: Any) -> dict[str, Any]:
    """The input that takes ``knobs`` from a node of settings, which is put into ``made`` if there are any."""
    if not knobs:
        return {}
    made[number] = node("LowVRAMSettings", **knobs)
    return {"settings": [number, 0]}


def with_lora(made: Prompt, model: str, clip: str = "1") -> Prompt:
    made["11"] = node("LoraLoaderModelOnly", model=[model, 0], lora_name=LORA, strength_model=1.0)
    return made


def saved(made: Prompt, number: str, kind: str, **inputs: Any) -> Prompt:
    """``made`` with another decoder of the same latents, saved by node ``number``9."""
    made[number] = node(kind, **inputs)
    made[number + "9"] = node("SaveImage", images=[number, 0], filename_prefix="decoded")
    return made


def pixels(path: Path) -> Any:
    return numpy.asarray(Image.open(path).convert("RGB")).astype(int)


def far(a: Path, b: Path) -> Any:
    """How far two pictures are apart in every value, in steps of 255."""
    return abs(pixels(a) - pixels(b))


def test_imported_and_listed(server) -> None:
    assert any(PACK in line and "IMPORT FAILED" not in line for line in server.lines(r"seconds.*: "))
    info = server.call("/object_info")
    ours = {name for name, one in info.items() if one["python_module"] == f"custom_nodes.{PACK}"}
    assert ours >= TITLES.keys()
    assert not server.lines(f"File .*{PACK}") and not server.lines(f"Cannot import .*{PACK}")


def test_the_page_gets_its_script_and_help(server) -> None:
    assert f"/extensions/{PACK}/lowvram.js" in server.call("/extensions")
    for name, title in TITLES.items():
        assert server.text(f"/extensions/{PACK}/docs/{name}.md").startswith(f"# {title}\n")
    options = server.call("/object_info/LowVRAM")["LowVRAM"]
    assert all(options["output_tooltips"]) and [*options["input"]["required"]] == ["model", "vae", "budget"]
    settings = server.call("/object_info/LowVRAMSettings")["LowVRAMSettings"]["input"]["optional"]
    assert settings["park_skips"][1]["display_name"] == "Step · Wait in RAM"


@pytest.mark.parametrize(("budget", "told"), [("banana", "is not a size"), ("4", "4GB")])
def test_one_mistake_is_one_error_before_anything_is_loaded(server, budget, told) -> None:
    size = {"width": 512, "height": 512, "batch": 1, "steps": 2}
    made = {"1": prompt()["1"]}  # where another output is sound, the host runs that one
    made["12"] = node("LowVRAMPlan", model=["1", 0], vae=["1", 2], budget=budget, **size)
    with pytest.raises(RunError, match=told) as raised:
        server.start(made)
    ((errors,),) = [[one["errors"]] for one in json.loads(str(raised.value))["node_errors"].values()]
    assert len(errors) == 1 and errors[0]["extra_info"]["input_name"] == "budget"


def test_an_error_in_a_run_names_no_path(server) -> None:
    made = prompt()
    made["12"] = node("LowVRAMPlan", model=["1", 0], vae=["1", 2], budget="", width=1001, height=512, batch=1, steps=2)
    with pytest.raises(RunError, match="1000") as raised:
        server.run(made)
    ((_, told),) = [one for one in json.loads(str(raised.value)) if one[0] == "execution_error"]
    assert told["exception_type"] == "sd_lowvram.errors.BadInputError" and "/" not in told["exception_message"]


def test_a_size_that_does_not_fit_is_refused_with_one_that_does(server) -> None:
    made = optimized(prompt(1024), budget="3400MB")
    with pytest.raises(RunError, match=r"1024x1024 .* (\d+)x\1 ") as raised:
        server.run(made)
    needed = re.findall(r"needs at least ([\d.]+ \w+)", str(raised.value))
    assert needed and all(parse_size(size) > parse_size("3400MB") for size in needed)


def test_the_plan_node_shows_what_low_vram_runs(server, stock) -> None:
    made = prompt()
    size = {"budget": "8GB", "width": SIZE, "height": SIZE, "batch": 1, "steps": 2}
    made = optimized(made, budget="8GB", **CHUNKED)
    made["12"] = node("LowVRAMPlan", model=["1", 0], vae=["1", 2], **size, settings=["100", 0])
    made["6"]["inputs"]["vae"] = ["10", 1]
    made["13"] = node("LowVRAMReport", plan=["10", 2], images=["6", 0])
    entry = server.run(made)
    shown, report = (entry["outputs"][number]["text"][0] for number in ("12", "13"))
    assert shown.startswith("fits: ") and "8 GiB" in shown and "2 steps" in shown
    lines = [
        [line for line in text.splitlines() if line.startswith(("a step ", "decode "))] for text in (shown, report)
    ]
    rows = [[re.findall(r"^\w+|[\d.]+ [KMG]iB", line)[:2] for line in some] for some in lines]
    assert rows[0] == rows[1] and len(rows[0]) == 2  # stage and planned bytes
    assert "2 steps" in report and " measured, " in report
    assert "residual_strips 22" in report and entry["outputs"]["10"]["text"][0].startswith("fits: ")
    assert far(stock, server.pictures(entry)["7"]).max() <= 1


@pytest.mark.parametrize("ours", ["before", "after"])
def test_hypertile_on_either_side(server, ours) -> None:
    """It tiles queries alone, which no kernel but the host's own takes as they come."""
    small = 256
    tiles = {"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False}
    made = prompt(small, seed=3)
    made["14"] = node("HyperTile", model=["1", 0], **tiles)
    made["5"]["inputs"]["model"] = ["14", 0]
    plain = server.pictures(server.run(made))["7"]
    made = optimized(made, "14")
    if ours == "before":
        made["10"]["inputs"]["model"], made["14"]["inputs"]["model"] = ["1", 0], ["10", 0]
        made["5"]["inputs"]["model"] = ["14", 0]
    assert far(plain, server.pictures(server.run(made))["7"]).max() <= 1


@pytest.fixture(scope="module")
def stock(server) -> Path:
    return server.pictures(server.run(prompt()))["7"]


@pytest.fixture(scope="module")
def decoded(server, stock) -> dict[str, Path]:
    """One sampling through our model node, decoded by the stock nodes and in every way of ours; the report with it."""
    made = optimized(prompt(), **CHUNKED, vae_tiles="exact", vae_map="parked")
    strips = chosen(made, "101", vae_tiles="exact")
    saved(made, "20", "LowVRAMVAEDecode", samples=["5", 0], vae=["1", 2], budget="", **strips)
    saved(made, "31", "VAEDecode", samples=["5", 0], vae=["10", 1])
    here = chosen(made, "102", decoder_device="cpu", vae_tiles="exact")
    saved(made, "40", "LowVRAMVAEDecode", samples=["5", 0], vae=["1", 2], budget="", **here)
    tiles = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    saved(made, "50", "VAEDecodeTiled", samples=["5", 0], vae=["1", 2], **tiles)
    exact = {"budget": "", **chosen(made, "103", vae_tiles="exact", vae_strip_mib=1)}
    made["32"] = node("LowVRAM", model=["1", 0], vae=["1", 2], budget="")
    saved(made, "51", "VAEDecodeTiled", samples=["5", 0], vae=["32", 1], **tiles)
    encoders = (("70", "VAEEncode", "1", 2, {}), ("80", "LowVRAMVAEEncode", "1", 2, exact))
    for number, encoder, vae, output, more in (*encoders, ("90", "VAEEncodeTiled", "32", 1, tiles)):
        made[number] = node(encoder, pixels=["6", 0], vae=[vae, output], **more)
        saved(made, f"{number}1", "VAEDecode", samples=[number, 0], vae=["1", 2])
    made["60"] = node("LowVRAMReport", plan=["10", 2], images=["31", 0])
    entry = server.run(made)
    server.report = entry["outputs"]["60"]["text"][0]
    return server.pictures(entry)


def test_the_model_node_keeps_the_picture(server, stock, decoded) -> None:
    assert far(stock, decoded["7"]).max() <= 1
    assert len(server.lines("sd-lowvram: .*calls of the model")) == len(server.lines("sd-lowvram: "))  # a line a run
    (line,) = (line for line in server.report.splitlines() if line.startswith("sites: "))
    assert "attention 32" in line and "residual_strips 22" in line and "feed_forward 16" in line


def test_the_vae_nodes_keep_the_picture(server, decoded) -> None:
    plain = decoded["7"]
    for number in ("209", "319", "409", "519"):
        assert (far(plain, decoded[number]) <= 1).mean() >= 0.999
    assert (far(plain, decoded["509"]) <= 1).mean() < 0.9  # stock tiles
    assert far(decoded["209"], decoded["409"]).max() <= 1
    for number in ("8019", "9019"):  # encoded, and decoded by the stock node
        assert (far(decoded["7019"], decoded[number]) <= 1).mean() >= 0.999
    (line,) = (line for line in server.report.splitlines() if line.startswith("decode: "))
    assert "Decode in parts: exact" in line and "Unfinished picture: parked" in line


def test_latents_are_saved_first_and_decoded_without_the_host(server, stock) -> None:
    made = optimized(prompt(), **CHUNKED)
    for number, choice in (("20", "keep"), ("21", "until decoded")):
        ours = {"budget": "", **chosen(made, f"{number}0", vae_tiles="exact", save_latents=choice)}
        saved(made, number, "LowVRAMVAEDecode", samples=["5", 0], vae=["1", 2], **ours)
    seen: set[Path] = set()
    begun = server.start(made)
    with ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(server.finish, begun)
        while not ended.done():
            seen |= set(server.output.glob("*.latents.safetensors"))
            time.sleep(0.02)
    pictures = server.pictures(ended.result())
    [kept] = server.output.glob("*.latents.safetensors")
    assert len(seen) == 2 and kept in seen and kept.stat().st_mtime < pictures["209"].stat().st_mtime
    done = call("resume", kept.name, folder=server.output)
    assert done.returncode == 0, done.stderr
    picture = kept.with_name(kept.name.replace(".latents.safetensors", ".png"))
    assert not kept.exists() and (far(picture, pictures["209"]) <= 1).mean() >= 0.999
    with Image.open(picture) as ours, Image.open(pictures["209"]) as theirs:
        assert json.loads(ours.info["prompt"]) == json.loads(theirs.info["prompt"])


def test_below_what_fits_a_plan_does_less_and_says_so(server) -> None:
    """On a CPU ComfyUI keeps the weights, 3279 MiB of the UNet and 319 of the VAE, whatever the budget is."""
    made, budgets = prompt(), {"12": "4GB", "13": "3450MB", "14": "3350MB", "15": "1MB"}
    for number, budget in budgets.items():
        size = {"budget": budget, "width": 512, "height": 512, "batch": 1, "steps": 2}
        made[number] = node("LowVRAMPlan", model=["1", 0], vae=["1", 2], **size)
    saved(made, "20", "LowVRAMVAEDecode", samples=["5", 0], vae=["1", 2], budget="300MB")
    made["30"] = node("LowVRAM", model=["1", 0], vae=["1", 2], budget="290MB")
    saved(made, "31", "VAEDecode", samples=["5", 0], vae=["30", 1])
    entry = server.run(made)
    told = {number: entry["outputs"][number]["text"][0].splitlines() for number in (*budgets, "20")}
    assert [told[number][0].split(":")[0] for number in budgets] == 2 * ["fits"] + 2 * ["above the budget"]

    def line(number: str, begins: str) -> str:
        return next(one for one in told[number] if one.startswith(begins))

    planned = [parse_size(re.findall(r"[\d.]+ [MG]iB", line(number, "a step "))[0]) for number in budgets]
    assert planned == sorted(planned, reverse=True), planned
    assert "model 3.2" in line("12", "largest moment: ") and "VAE 319 MiB" in line("20", "largest moment: ")
    assert all("CLIP" in line(number, "also loaded: ") for number in ("12", "20"))
    assert re.search("VAE 319 MiB.*ComfyUI", line("12", "also loaded: "))
    assert told["20"][0].startswith("above the budget: ")
    assert server.lines("sd-lowvram: decode .* is above the budget: .* of 290 MiB")
    pictures = server.pictures(entry)
    assert all((far(pictures["7"], pictures[number]) <= 1).mean() >= 0.999 for number in ("209", "319"))


def test_the_report_compares(server, decoded) -> None:
    report = server.report
    rows = [line.split() for line in report.splitlines() if line.startswith(("a step ", "decode "))]
    assert len(rows) == 2 and all(row.count("s") == 2 for row in rows) and "residual_strips 22" in report


def test_the_recorder_writes_nothing_to_the_console(server, decoded) -> None:
    """A Report has the allocator recorded, in the thread that runs workflows."""
    assert not server.lines("USDT:|External init callback")


def test_a_report_runs_where_low_vram_is_bypassed(server) -> None:
    """The page sends it no plan then: the host refused the workflow."""
    made = {"1": node("EmptyImage", width=64, height=64, batch_size=1, color=0)}
    made["2"] = node("LowVRAMReport", images=["1", 0])
    assert "Low VRAM is bypassed" in server.run(made)["outputs"]["2"]["text"][0]


@pytest.mark.serves("LoRA")
def test_loras_have_their_full_effect(server) -> None:
    small = 128
    without = server.pictures(server.run(prompt(small)))["7"]
    made = with_lora(prompt(small), "1")
    made["5"]["inputs"]["model"] = ["11", 0]
    plain = server.pictures(server.run(made))["7"]
    before = server.pictures(server.run(optimized(with_lora(prompt(small), "1"), "11", **CHUNKED)))["7"]
    made = with_lora(optimized(prompt(small), **CHUNKED), "10")
    made["5"]["inputs"]["model"] = ["11", 0]
    after = server.pictures(server.run(made))["7"]
    assert far(without, plain).mean() > 5
    assert far(plain, before).max() <= 1 and far(plain, after).max() <= 1


def test_cancel_and_errors_leave_the_host_as_it_was(server) -> None:
    small = 128
    first = pixels(server.pictures(server.run(prompt(small, seed=7)))["7"])
    number = server.start(optimized(prompt(small, seed=8, steps=30), **CHUNKED))
    end = time.monotonic() + 300
    while not server.lines(r"\b1/30 ") and time.monotonic() < end:
        time.sleep(0.2)
    server.call("/interrupt", {})
    with pytest.raises(RunError, match="interrupted"):
        server.finish(number)
    with pytest.raises(RunError, match="MiB"):
        server.run(optimized(prompt(small, seed=9), budget="banana"))
    server.call("/free", {"unload_models": False, "free_memory": True})
    again = pixels(server.pictures(server.run(prompt(small, seed=7)))["7"])
    assert (first == again).all()


EXAMPLES = [path for path in sorted((ROOT / "example_workflows").glob("*.json")) if "Smaller UNet" not in path.stem]


_LOADS = {"UNETLoader": 0, "CLIPLoader": 1, "DualCLIPLoader": 1, "VAELoader": 2}
"""Loaders of parts, by the output of a checkpoint's loader that takes their place."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_workflows_are_accepted(server, path) -> None:
    """Every input of every node has a value that the host takes; SD1.5's at a smaller size run through."""
    made = to_prompt(json.loads(path.read_text(encoding="utf-8")), server.call("/object_info"))
    for one in made.values():
        for name in one["inputs"].keys() & {"ckpt_name"}:
            one["inputs"][name] = NAME
        if one["class_type"] == "KSampler":
            one["inputs"]["steps"] = 1
        for name in one["inputs"].keys() & {"width", "height"}:
            one["inputs"][name] = 128
    loaders = {number: one["class_type"] for number, one in made.items() if one["class_type"] in _LOADS}
    made |= {number: node("CheckpointLoaderSimple", ckpt_name=NAME) for number in loaders}
    for one in made.values():
        for name, value in one["inputs"].items():
            if isinstance(value, list) and value[0] in loaders:
                one["inputs"][name] = [value[0], _LOADS[loaders[value[0]]]]
    if loaders or "SDXL" in path.stem:
        number = server.start(made)
        server.call("/interrupt", {})
        server.call("/queue", {"delete": [number]})
        return
    if "img2img" in path.stem:
        shrunk = node("ImageScale", upscale_method="area", width=128, height=128, crop="disabled")
        loader = next(number for number, one in made.items() if one["class_type"] == "LoadImage")
        encoder = next(one for one in made.values() if one["class_type"] == "LowVRAMVAEEncode")
        made["90"], encoder["inputs"]["pixels"] = shrunk, ["90", 0]
        shrunk["inputs"]["image"] = [loader, 0]
    entry = server.run(made)
    assert server.pictures(entry)


def test_deterministic_gives_equal_bits_in_two_processes(host, server, tmp_path) -> None:
    made = optimized(prompt(128, seed=11), deterministic="on")
    first = pixels(server.pictures(server.run(made))["7"])
    with serving(host, PYTHON, tmp_path, "--use-pytorch-cross-attention") as fresh:
        assert (pixels(fresh.pictures(fresh.run(made))["7"]) == first).all()
