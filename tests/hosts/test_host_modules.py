"""Every hook on the very modules of the hosts that COMFYUI_DIR and WEBUI_DIR name, and what they leave of the
activations of SD1.5's full-size UNet.

ComfyUI's modules run under COMFYUI_PYTHON, as they import what only its environment has, and Forge Neo's under
WEBUI_PYTHON. The other WebUIs' run under our own Python; under WEBUI_PYTHON those of A1111 too, whose torch is older,
and sgm, which needs packages of that environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_unet_memory
from unet_bounds import BOUNDS, SMALLEST
from webui_server import kind_of

ROOT = Path(__file__).parents[2]
HIT = {
    "attention": 32,
    "feed_forward": 16,
    "residual_strips": 22,
    "transformer_chunks": 16,
    "park_skips": 46,
    "guidance_in_turn": 46,
}
HIT_SDXL = {
    "attention": 140,
    "feed_forward": 70,
    "residual_strips": 17,
    "transformer_chunks": 70,
    "park_skips": 34,
    "guidance_in_turn": 34,
}
COMFYUI, WEBUI = os.environ.get("COMFYUI_DIR"), os.environ.get("WEBUI_DIR")
KIND = kind_of(WEBUI).replace("neo", "forge")
PYTHON = os.environ.get("WEBUI_PYTHON") or f"{WEBUI}/venv/bin/python"

needs_comfyui = pytest.mark.skipif(not COMFYUI, reason="COMFYUI_DIR names no ComfyUI")
needs_webui = pytest.mark.skipif(not WEBUI, reason="WEBUI_DIR names no AUTOMATIC1111, Forge or reForge")
needs_a1111 = pytest.mark.skipif(KIND != "a1111", reason="WEBUI_DIR names no AUTOMATIC1111")


def report_of(host: str, folder: str | None, python: str = sys.executable) -> dict[str, Any]:
    program = [python, str(Path(__file__).with_name("host_modules.py")), host, str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check_hooks(found: dict[str, Any], hit: dict[str, int]) -> None:
    for name, one in found.items():
        assert one["error"] < 1e-5 and one["restored"], (name, one)
    for hook, count in hit.items():
        assert found[hook]["sites"] == {hook: count}
    assert found["together"]["sites"] == hit
    for way in ("decode", "encode"):
        assert all(found[f"{way} {kept}"]["sites"] == {"vae_exact": 2} for kept in ("held", "parked", "recomputed"))
    assert found["decode attention"]["sites"] == {"attention": 2}


def check_peaks(peaks: dict[str, int], same_torch: bool = True) -> None:
    """Within the bounds, and under the same torch, whose kernels count, as much as the same UNet of diffusers."""
    assert {int(size) for size in peaks} == set(BOUNDS)
    for size, bound in BOUNDS.items():
        assert 0 < peaks[str(size)] <= bound
        if same_torch:
            expected = test_unet_memory.traced(SMALLEST, size, 2).activation_peak_bytes
            assert peaks[str(size)] == pytest.approx(expected, rel=0.05)


@needs_comfyui
def test_comfyui() -> None:
    python = os.environ.get("COMFYUI_PYTHON")
    report = report_of("comfyui", COMFYUI, python or sys.executable)
    check_hooks(report["hooks"], HIT)
    check_peaks(report["peaks"], same_torch=python is None)


@needs_webui
def test_webui() -> None:
    assert KIND, f"{WEBUI} is neither AUTOMATIC1111 nor Forge nor reForge"
    neo = kind_of(WEBUI) == "neo"  # which imports what only its environment has
    report = report_of(KIND, WEBUI, PYTHON if neo else sys.executable)
    check_hooks(report["hooks"], HIT)
    check_peaks(report["peaks"], same_torch=not neo)
    frames = report.get("autoencoders", {})
    assert len(frames) == (4 if neo else 0)
    for name, ways in frames.items():
        for one in ways.values():
            assert one["error"] < 5e-6 and one["restored"] and one["sites"]["vae_exact"] >= 2, (name, one)
    loaded = {int(room): count for room, count in report.get("loaded", {}).items()}
    assert len(loaded) == (3 if neo else 0)
    if loaded:
        *limited, plenty = loaded
        assert all(room // 2 < loaded[room] <= room for room in limited) and 2 * loaded[plenty] == plenty, loaded


@needs_a1111
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="set WEBUI_PYTHON to the Python of AUTOMATIC1111")
@pytest.mark.parametrize(("host", "hit"), [("a1111", HIT), ("a1111_sdxl", HIT_SDXL)], ids=["ldm", "sgm"])
def test_a1111_under_its_own_torch(host: str, hit: dict[str, int]) -> None:
    report = report_of(host, WEBUI, PYTHON)
    check_hooks(report["hooks"], hit)
    if host == "a1111":
        check_peaks(report["peaks"], same_torch=False)
