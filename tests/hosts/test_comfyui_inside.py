"""Our nodes among ComfyUI's own classes, on narrow checkpoints of every kind that they serve, and of some they refuse.

COMFYUI_DIR=... [COMFYUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMFYUI = os.environ.get("COMFYUI_DIR")
PYTHON = os.environ.get("COMFYUI_PYTHON", sys.executable)
HERE = Path(__file__).parent
WHOLE = "SD1.x, SDXL: txt2img, img2img, inpainting with 4 channels"
SD2 = "SD2.x, epsilon and v-prediction"
KINDS = {
    "sd15": WHOLE,
    "inpaint": "inpainting checkpoints with 9 channels",
    "instruct": "InstructPix2Pix, 8 channels",
    "sd2": SD2,
    "sd2v": SD2,
    "sdxl": WHOLE,
    "refiner": "SDXL refiner",
}
"""Kinds of checkpoints, each with its row of README's table of models."""
TODAY = {
    "sd3": "SD3",
    "flux": "FLUX.1",
    "flux2": "FLUX.2",
    "z-image": "Z-Image",
    "lumina2": "Lumina 2",
    "chroma": "Chroma",
    "qwen-image": "Qwen-Image",
    "wan": "Wan 2.1",
}
"""Models that our hooks do not know, by the names that people know."""
serves = pytest.mark.serves

pytestmark = [pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_DIR to a ComfyUI that runs"), pytest.mark.in_order]


def inside(script: str, *arguments: str) -> list[Any]:
    """What a script of ours prints in ComfyUI's own Python, a JSON value a line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, HERE / script, str(COMFYUI), *arguments],
        capture_output=True,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "USDT:" not in done.stderr and "External init callback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@serves("PAG")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=serves(row)) for kind, row in KINDS.items()])
def test_equal_pictures_beside_every_stock_node_in_every_storage(kind, capsys) -> None:
    """Each side of ours, with a plan that changes nothing and with every knob on."""
    cases = inside("comfyui_matrix.py", kind)
    unequal = [case for case in cases if case.get("relative", 1) > 1e-4 or not case["finite"]]
    with capsys.disabled():
        farthest = max(case.get("relative", float("inf")) for case in cases)
        equal = f"{len(cases) - len(unequal)} of {len(cases)} cases of {kind}"
        print(f" {equal} are equal, their relative error {farthest:.0e} at most")
    assert len(cases) == 3 * (2 + 8 * 4)
    assert unequal == []


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    (found,) = inside("comfyui_checks.py")
    return dict(found)


@pytest.fixture(scope="module")
def today() -> dict[str, Any]:
    (found,) = inside("comfyui_today.py")
    return dict(found)


@serves("SD3, Z-Image, Chroma")
@serves("FLUX.1")
@serves("FLUX.2")
@serves("Qwen-Image; Wan")
@pytest.mark.parametrize(("kind", "name"), TODAY.items())
def test_models_of_today_are_foretold_and_run_as_they_are(today, kind, name) -> None:
    """Plan, a sampling with the node on, Report, torch.compile behind it, a merge and what ModelSave writes."""
    if kind not in today["models"]:
        pytest.skip("this ComfyUI does not know it")
    found = today["models"][kind]
    assert found["plan"].startswith("fits: ") and f"{name} runs as" in found["plan"]
    assert "denoise" in found["report"] and "2 steps" in found["report"]
    assert max(found["far"], found["compiled"], found["merged"]) < 1e-5
    assert found["saved"] and found["clean"] == []
    assert found["measured"] <= found["planned"] * 1.02 + (2 << 20)
    assert found["measured"] >= found["planned"] * 0.7


@serves("AnimateDiff, SVD and other video; all else")
def test_what_cannot_be_traced_is_said_and_runs_within_the_budget(today) -> None:
    told = today["refusals"]
    assert told["Low VRAM"].startswith("no prediction for Wan 2.1: ") and told["far"] == "0.0"
    assert told["Plan"].startswith("BadInputError: no prediction") and told["Report"].startswith("no prediction")


@serves("TAESD in place of the VAE")
def test_a_vae_of_another_kind_passes_through_where_the_model_is_served(today, capsys) -> None:
    told = today["refusals"]
    assert "the VAE passes through unchanged" in told["taesd in Low VRAM"]
    refused = told["taesd in VAE Decode"]
    assert "Error: " in refused and "stock VAE Decode" in refused and len(refused.splitlines()) == 1
    with capsys.disabled():
        print(f" {refused}")


@pytest.mark.parametrize("room", ["all", "fewer"])
@pytest.mark.parametrize("way", ["masks", "Perp-Neg", "DualCFG"])
def test_several_prompts_hold_what_was_foretold(today, way, room) -> None:
    """All in one call where they fit, else in as many as the budget needs."""
    found = today["prompts"][f"{way}, {room}"]
    most, prompts = max(found["calls"]), sum(found["stock"])
    assert found["stock"] == [5 if way == "masks" else 3] and sum(found["calls"]) == prompts
    assert most == found["rows"] and (most == prompts) == (room == "all")
    assert found["held"] <= found["planned"] <= 1.2 * found["held"] and found["fits"]
    assert found["far"] < 1e-5 and found["notes"] == []


def test_the_time_is_that_of_all_calls_of_a_step(today) -> None:
    """Known samplers beforehand, unknown ones from the first steps on."""
    found = {name: one for name, one in today["times"].items() if name not in ("windows", "held", "dpm_adaptive")}
    unequal = {name: one for name, one in found.items() if round(6 * one["told"][-1]) != one["calls"]}
    assert unequal == {} and len(found) > 30
    known = {"heun", "dpm_2", "dpm_2_ancestral", "dpmpp_sde", "dpmpp_2s_ancestral", "seeds_3"}
    assert all(len(found[name]["told"]) == 1 and found[name]["calls"] > 6 for name in known)


def test_windows_of_frames_are_planned_and_logged_as_they_are(today) -> None:
    windows, (held, planned) = today["times"]["windows"], today["times"]["held"]
    # a window has five frames, and in a later ComfyUI the first one before them
    assert re.search("128x128, 13 frames in windows of [56],", windows["report"]) and windows["notes"] == []
    assert 0.7 * planned <= held <= planned * 1.02 + (2 << 20)
    assert windows["calls"] > 3 and 3 * windows["told"][-1] == pytest.approx(windows["calls"], rel=0.2)


def test_weights_in_8_bits_are_widened_as_by_comfyui() -> None:
    found = inside("comfyui_scaled.py")
    if not found:
        pytest.skip("this ComfyUI keeps no weights in 8 bits with scales")
    assert len(found) == 15 and all(one["kept"] and one["same"] for one in found), found


AIMDO = os.environ.get("COMFYUI_AIMDO", "")
"""The folder of another comfy_aimdo than ComfyUI's own: from 0.6.0 on a refusal of its library is an error."""


@pytest.fixture(scope="module")
def dynamic() -> dict[str, Any]:
    (found,) = inside("comfyui_dynamic.py", *filter(None, [AIMDO]))
    if "absent" in found:
        pytest.skip("this ComfyUI has no dynamic VRAM")
    return dict(found)


CLIP, MODEL, VAE, OTHER = "0123"
"""The ranges of addresses of dynamic VRAM, in the order in which their models are loaded first."""


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("sampling", MODEL),
        ("decode", VAE),
        ("sampling again", MODEL),
        ("another model", OTHER),
        ("interrupt", MODEL),
    ],
)
def test_dynamic_vram_is_bounded_behind_each_load_and_open_again_afterwards(dynamic, run, name) -> None:
    calls = [(what, str(of)) for what, of in dynamic["calls"][run]]
    assert calls[0] == ("load", name)
    (bound,) = (what for what, of in calls if isinstance(what, int) and of == name)
    assert 0 < bound < dynamic["pages"][name]
    made_room = {of for what, of in calls if what == "freed"}
    behind = calls.index((bound, name))
    assert {of for what, of in calls[:behind] if what != "load"} == made_room and name not in made_room
    assert sorted(calls[behind + 1 :]) == sorted(("all", of) for of in {name, *made_room})


@pytest.mark.parametrize("run", ["encode", "encode of a clone"])
def test_the_weights_of_a_text_encoder_are_limited_behind_each_load(dynamic, run) -> None:
    calls = [(what, str(of)) for what, of in dynamic["calls"][run]]
    assert calls[0] == ("load", CLIP)
    (bound,) = (what for what, of in calls if isinstance(what, int) and of == CLIP)
    assert 0 < bound < dynamic["pages"][CLIP]
    assert dynamic["calls"]["encode as ever"] == [["load", int(CLIP)]]


def test_all_that_the_bound_takes_of_the_host_is_there(dynamic) -> None:
    assert dynamic["renamed"] == []


def test_nothing_of_the_bound_is_left(dynamic) -> None:
    assert dynamic["calls"]["without our node"] == [["load", int(MODEL)]]
    assert set(dynamic["left"]) == {0} and dynamic["callbacks"] == []


@pytest.mark.parametrize("kind", ["sd15", "flux"])
def test_new_sizes_free_no_host_buffer_and_clone_no_tensor(dynamic, kind) -> None:
    """Hooked and traced plain, with LoRAs and pinned weights on the layers."""
    found = dynamic["buffers"][kind]
    assert found["layers"] >= found["loras"] > 0 and found["pinned"] == 8
    assert (found["freed"], found["cloned"]) == (0, 0)


@pytest.mark.parametrize(("kind", "hooked"), [("sd15", True), ("flux", False)])
def test_the_compiler_is_off_where_hooks_act_in_layers(dynamic, kind, hooked) -> None:
    found = dynamic["buffers"][kind]
    assert found["during"] == [hooked, hooked] and found["after"] == [False, False]


@pytest.mark.skipif(not AIMDO, reason="set COMFYUI_AIMDO to the folder of comfy_aimdo 0.6.0 or later")
@pytest.mark.parametrize(("refused", "said"), [("bound", "to limit the weights"), ("opening", "to lift the limit")])
def test_a_refused_bound_is_told(dynamic, refused, said) -> None:
    """Its pages stay or become open: ``test_nothing_of_the_bound_is_left``."""
    assert [said in note for note in dynamic[f"{refused} refused"]] == [True]


def test_what_dynamic_vram_kept_is_told(dynamic) -> None:
    kept, paged, bound = dynamic["kept"]
    assert 0 < paged <= bound and paged <= kept
    assert "denoise: dynamic VRAM was limited to " in dynamic["report"]
    paged, bound = dynamic["decode kept"]
    assert 0 < paged <= bound


@pytest.mark.parametrize("kind", ["sd15", "lumina2"])
def test_a_layers_handles_of_dynamic_memory_are_not_copied(today, kind) -> None:
    there, copied = today["layers"][kind]
    assert there > 0 and copied == 0


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("img2img", marks=serves(WHOLE)),
        pytest.param("inpainting", marks=serves(WHOLE)),
        *(pytest.param(kind, marks=serves("LCM, Turbo, Lightning")) for kind in ("LCM", "Turbo", "Lightning")),
        pytest.param("ControlNet", marks=serves("ControlNet (one, several, union), T2I-Adapter")),
    ],
)
def test_pictures_of_every_kind_are_equal_with_every_knob_on(facts, kind) -> None:
    assert facts["pictures"][kind] < 1e-4


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("knobs", "uncompiled"),
    [
        ("park_skips", True),
        ("residual_strips", True),
        ("guidance_in_turn", True),
        ("transformer_chunks", True),
        ("together", True),
        ("feed_forward_chunks", False),
        ("none", False),
    ],
)
def test_torch_compile_on_either_side(facts, knobs, uncompiled, order) -> None:
    far, told = facts["compiled"][f"{knobs}, {order}"]
    assert far < 1e-4 and told == uncompiled


@serves("FLUX.1")
@serves("SD3, Z-Image, Chroma")
@serves("FLUX.2")
@serves("Qwen-Image; Wan")
@pytest.mark.parametrize("kind", ["sd15", "flux", "flux2", "wan", "frames"])
def test_exact_tiles_hold_on_the_hosts_autoencoders(facts, kind) -> None:
    """By our nodes and by the host's own for tiles; with a peak as it was predicted."""
    if kind not in facts["autoencoders"]:
        pytest.skip("this ComfyUI knows no FLUX.2")
    found = facts["autoencoders"][kind]
    assert all(found[way] < 5e-6 for way in ("decode", "encode", "stock node"))
    assert found["measured"] <= found["told"] * 1.02 + (2 << 20) and found["measured"] >= found["told"] * 0.8


def test_the_rows_that_come_are_planned(facts) -> None:
    assert facts["rows"] == {
        "guided": [2, 1],
        "two at a scale of 1": [2, 2],
        "one at a scale of 1": [1, 1],
        "perturbed": [6, 3],
    }


@pytest.mark.parametrize("storage", ["fp32", "fp16", "fp8"])
def test_a_step_holds_what_was_planned_in_the_type_of_its_arithmetic(facts, storage) -> None:
    planned, held = facts["peaks"][storage]
    assert held <= planned + max(planned // 50, 2 << 20) and held >= planned * 0.8
