"""Our nodes among ComfyUI's own classes, on narrow checkpoints of every kind that they serve, and of some they refuse.

COMFYUI_DIR=... [COMFYUI_PYTHON=...] make test-hosts
"""

from __future__ import annotations

import json
import os
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
serves = pytest.mark.serves

pytestmark = pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_DIR to a ComfyUI that runs")


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


@serves("AnimateDiff, SVD and other video; all else")
@pytest.mark.parametrize(
    ("kind", "name", "works"),
    [
        ("svd", "SVD_img2vid makes video", False),
        ("sd3", "SD3 denoises with a transformer", True),
        ("flux", "Flux denoises with a transformer", True),
        ("lumina2", "Lumina2 denoises with a transformer", True),
    ],
)
def test_other_models_are_refused_in_the_hosts_words(facts, kind, name, works) -> None:
    told = facts["refusals"][kind]
    assert told.startswith(f"BadInputError: {name}: Low VRAM serves SD1.x")
    assert ("Its VAE works: VAE Decode (low VRAM)" in told) == works and "diffusers" not in told and "\n" not in told


@serves("TAESD in place of the VAE")
@pytest.mark.parametrize("where", ["taesd", "taesd in a plan"])
def test_a_small_vae_is_sent_to_the_stock_nodes(facts, where) -> None:
    told = facts["refusals"][where]
    assert told.startswith("BadInputError: TAESD ") and "stock VAE Decode" in told and "\n" not in told


@serves("FLUX.2")
def test_an_autoencoder_that_packs_its_latents_is_refused_by_name(facts) -> None:
    if "flux2" not in facts["refusals"]:
        pytest.skip("this ComfyUI knows no FLUX.2")
    told = facts["refusals"]["flux2"]
    assert told.startswith("BadInputError: AutoencoderKL packs its latents") and "FLUX.2" in told
    assert "stock VAE Decode" in told and "\n" not in told


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
@pytest.mark.parametrize("kind", ["sd15", "flux"])
def test_exact_tiles_hold_on_the_hosts_autoencoders(facts, kind) -> None:
    assert all(far < 1e-5 for far in facts["autoencoders"][kind].values())


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
