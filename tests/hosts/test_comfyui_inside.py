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
KINDS = ("sd15", "inpaint", "instruct", "sd2v", "sdxl", "refiner")

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


@pytest.mark.parametrize("kind", KINDS)
def test_equal_pictures_beside_every_stock_node_in_every_storage(kind, capsys) -> None:
    """Each side of ours, with a plan that changes nothing and with every knob on."""
    cases = inside("comfyui_matrix.py", kind)
    unequal = [case for case in cases if case.get("relative", 1) > 1e-4 or not case["finite"]]
    with capsys.disabled():
        farthest = max(case.get("relative", float("inf")) for case in cases)
        equal = f"{len(cases) - len(unequal)} of {len(cases)} cases of {kind}"
        print(f" {equal} are equal, their relative error {farthest:.0e} at most")
    assert len(cases) == 3 * (2 + 7 * 4)
    assert unequal == []


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    (found,) = inside("comfyui_checks.py")
    return dict(found)


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
    assert told.startswith(f"BadInputError: {name}: Optimize Model (low VRAM) serves SD1.x")
    assert ("Its VAE works: Optimize VAE" in told) == works and "diffusers" not in told and "\n" not in told


@pytest.mark.parametrize("where", ["taesd", "taesd in a plan"])
def test_a_small_vae_is_sent_to_the_stock_nodes(facts, where) -> None:
    told = facts["refusals"][where]
    assert told.startswith("BadInputError: TAESD ") and "stock VAE Decode" in told and "\n" not in told


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
