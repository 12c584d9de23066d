"""UNet Schedule in a real ComfyUI, over HTTP and inside of it.

COMFYUI_DIR=... [COMFYUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import test_comfyui
import torch
from comfyui_server import Prompt, RunError, Server, to_prompt
from test_comfyui import CHUNKED, COMFYUI, far, host, node, optimized, prompt, with_lora
from test_comfyui_inside import inside

from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.checkpoints.single_file_names import unet_state
from sd_lowvram.unets.prune import cut_of_kind, prune_unet

pytestmark = [pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_DIR to a ComfyUI that runs"), pytest.mark.in_order]
SMALL = "sd-lowvram-test-base.safetensors"
started = test_comfyui.server
__all__ = ["host", "started"]


@pytest.fixture(scope="module")
def server(host: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """The host with the UNet alone of SD1.5 from which the cut "base" took layers."""
    small, place = tmp_path_factory.mktemp("small") / SMALL, host / "models" / "diffusion_models" / SMALL
    unet = build_components("sd15", torch.float16, "meta", ("unet",))["unet"]
    random_checkpoint.write_state(unet_state(prune_unet(unet, cut_of_kind(unet.config, "base"))), small, seed=1)
    place.unlink(missing_ok=True)
    place.symlink_to(small)
    try:
        yield request.getfixturevalue("started")
    finally:
        place.unlink()


def test_it_is_listed_and_has_a_page(server: Server) -> None:
    assert "LowVRAMUNetSchedule" in server.call("/object_info")
    page = server.text(f"/extensions/{test_comfyui.PACK}/docs/LowVRAMUNetSchedule.md")
    assert "# UNet Schedule (low VRAM)" in page


def test_the_example_workflow_is_accepted(server: Server) -> None:
    text = (test_comfyui.ROOT / "example_workflows" / "Smaller UNet first (SD1.5).json").read_text(encoding="utf-8")
    made = to_prompt(json.loads(text), server.call("/object_info"))
    values: dict[str, Any] = {"ckpt_name": test_comfyui.NAME, "unet_name": SMALL, "schedule": "small:1,full:1"}
    values |= {"steps": 2, "width": 128, "height": 128}
    for one in made.values():
        one["inputs"] |= {name: values[name] for name in one["inputs"].keys() & values.keys()}
    assert server.pictures(server.run(made))


def in_turns(made: Prompt, schedule: str, model: str = "1", small: str = "15") -> Prompt:
    """``made`` with UNet Schedule before the sampler."""
    made["15"] = node("UNETLoader", unet_name=SMALL, weight_dtype="default")
    made["16"] = node("LowVRAMUNetSchedule", model=[model, 0], small=[small, 0], schedule=schedule)
    made["5"]["inputs"]["model"] = ["16", 0]
    return made


def in_a_row(made: Prompt, parts: tuple[tuple[str, int], ...]) -> Prompt:
    """``made`` with a stock sampler for each of the models that ``parts`` number, one after the other."""
    made["15"] = node("UNETLoader", unet_name=SMALL, weight_dtype="default")
    given = made.pop("5")["inputs"]
    given["noise_seed"] = given.pop("seed")
    steps, latents, begin = given["steps"], given["latent_image"], 0
    del given["denoise"]
    for place, (model, count) in enumerate(parts):
        ends = {"start_at_step": begin, "end_at_step": begin + count}
        ends |= {"add_noise": "disable" if begin else "enable"}
        begin += count
        ends |= {"return_with_leftover_noise": "enable" if begin < steps else "disable"}
        made[f"5{place}"] = node("KSamplerAdvanced", **{**given, **ends, "model": [model, 0], "latent_image": latents})
        latents = [f"5{place}", 0]
    made["6"]["inputs"]["samples"] = latents
    return made


def test_two_models_take_turns_in_one_sampling(server) -> None:
    """As stock samplers in a row do, also with our hooks on both and a LoRA behind."""

    def drawn(made: Prompt) -> Path:
        return server.pictures(server.run(made))["7"]

    def plain() -> Prompt:
        return prompt(128, seed=12, steps=3)

    whole, small = drawn(plain()), drawn(in_a_row(plain(), (("15", 3),)))
    wanted = drawn(in_a_row(plain(), (("15", 1), ("1", 2))))
    assert min(far(wanted, whole).mean(), far(wanted, small).mean(), far(whole, small).mean()) > 1
    assert far(wanted, drawn(in_turns(plain(), "small:1,full:2"))).max() <= 1
    assert far(small, drawn(in_turns(plain(), "small:3"))).max() == 0
    assert far(whole, drawn(in_turns(plain(), "small:1,full:2", small="1"))).max() == 0

    made = in_turns(plain(), "small:1,full:2", model="17", small="18")
    for number, model in (("17", "1"), ("18", "15")):
        ours = optimized(prompt(128), model, **CHUNKED)
        made |= {number: ours["10"], "100": ours["100"]}
    assert far(wanted, drawn(made)).max() <= 1
    lines = server.lines("sd-lowvram: .*calls of the model")[-2:]
    assert sorted(line.split(", ")[1] for line in lines) == ["1 calls of the model", "2 calls of the model"]

    made = with_lora(in_a_row(plain(), (("15", 1), ("11", 2))), "1")
    wanted = drawn(made)
    made = with_lora(in_turns(plain(), "small:1,full:2"), "16")
    made["5"]["inputs"]["model"] = ["11", 0]
    assert far(wanted, drawn(made)).max() <= 1


def test_a_schedule_that_cannot_be_is_told(server) -> None:
    with pytest.raises(RunError, match=r"'small'.*NAME:STEPS"):
        server.start(in_turns(prompt(128), "small"))
    with pytest.raises(RunError, match=r"5 .*2: "):
        server.run(in_turns(prompt(128), "small:2,full:3"))
    with pytest.raises(RunError, match=r"VRAM.*UNet Schedule"):
        server.run(optimized(in_turns(prompt(128), "small:1,full:1"), "16", 128))


@pytest.fixture(scope="module")
def turns() -> dict[str, Any]:
    (found,) = inside(str(Path(__file__).with_name("comfyui_schedule.py")))
    return dict(found)


def test_two_models_take_turns_as_samplings_in_a_row_do(turns) -> None:
    found = turns["pictures"]
    in_a_row = {name: found.pop(name) for name in ("small first", "full first", "full, small, full")}
    assert all(far < 1e-5 for far in in_a_row.values()), in_a_row
    assert len(found) == 6 and all(value is True for value in found.values()), found
    assert turns["calls"].pop("heun") == [6, 3]
    assert len(turns["calls"]) == 5 and all(calls == [3, 2] for calls in turns["calls"].values())


def test_each_model_in_a_schedule_keeps_its_loras_and_its_hooks(turns) -> None:
    found = turns["patched"]
    assert found["lora"] < 1e-5 and found["without it"] > 1e-2 and found["hooked"] < 1e-4
    assert all(sites["feed_forward"] > 0 and sites["guidance_in_turn"] > 0 for sites in found["sites"])
    assert found["asked"] == [1, 1]  # by its own plan's bytes, at its turn
    assert found["batch and passes of the small one"] == [2, 2]


def test_what_stands_behind_a_schedule_takes_part(turns) -> None:
    found = turns["behind"]
    assert found.pop("without it") > 1e-4 and found.pop("around") == 3
    assert len(found) == 6 and all(far < 1e-5 for far in found.values()), found


def test_the_host_is_asked_for_the_model_whose_turn_it_is(turns) -> None:
    assert turns["loads"] == {
        "small first": [["small"], ["full"]],
        "full first": [["full"], ["small"]],
        "full, small, full": [["full"], ["small"], ["full"]],
    }


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("steps", "5 .*7"),
        ("another family", "adm_in_channels .*None .*1600"),
        ("another prediction", "EPS .*V_PREDICTION"),
        ("no UNet", "Flux"),
        ("twice", "this MODEL is a schedule of two"),
        ("optimized after", "UNet Schedule"),
        ("planned after", "UNet Schedule"),
        ("deep features", "Reuse deep features every N steps"),
    ],
)
def test_what_a_schedule_cannot_do_is_told(turns, what, why) -> None:
    told = turns["refusals"][what]
    assert told.startswith("BadInputError: ") and re.search(why, told) and "\n" not in told
    assert turns["refusals"]["deep features, one turn each"] == turns["refusals"]["after all"] == ""
