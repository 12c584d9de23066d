"""Every hook on the very modules of the hosts that COMFYUI_DIR and WEBUI_DIR name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HIT = {
    "attention": 32,
    "feed_forward": 16,
    "residual_strips": 22,
    "transformer_chunks": 16,
    "park_skips": 46,
    "guidance_in_turn": 46,
}
WEBUIS = {
    "backend/nn/unet.py": "forge",
    "ldm_patched": "reforge",
    "repositories/stable-diffusion-stability-ai": "a1111",
}


def report_of(host: str, folder: str) -> dict[str, Any]:
    program = [sys.executable, str(Path(__file__).with_name("host_modules.py")), host, folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(report: dict[str, Any]) -> None:
    for name, found in report.items():
        assert found["error"] < 1e-5 and found["restored"], (name, found)
    for hook, count in HIT.items():
        assert report[hook]["sites"] == {hook: count}
    assert report["together"]["sites"] == HIT
    assert report["decode held"]["sites"] == {"vae_exact": 2} and report["decode attention"]["sites"] == {
        "attention": 2
    }


@pytest.mark.skipif("COMFYUI_DIR" not in os.environ, reason="COMFYUI_DIR names no ComfyUI")
def test_comfyui() -> None:
    check(report_of("comfyui", os.environ["COMFYUI_DIR"]))


@pytest.mark.skipif("WEBUI_DIR" not in os.environ, reason="WEBUI_DIR names no AUTOMATIC1111, Forge or reForge")
def test_webui() -> None:
    folder = os.environ["WEBUI_DIR"]
    host = next((host for part, host in WEBUIS.items() if (Path(folder) / part).exists()), None)
    assert host is not None, f"{folder} is neither AUTOMATIC1111 nor Forge nor reForge"
    check(report_of(host, folder))
