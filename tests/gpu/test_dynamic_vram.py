"""On a card, ComfyUI's dynamic VRAM keeps to the budget of our nodes, and its pictures are the stock ones.

COMFYUI_DIR=... [COMFYUI_PYTHON=...] make gpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMFYUI = os.environ.get("COMFYUI_DIR")
SCRIPT = Path(__file__).parents[1] / "hosts" / "comfyui_on_card.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMFYUI, reason="set COMFYUI_DIR to a ComfyUI with dynamic VRAM"),
]


def test_a_budget_bounds_dynamic_vram() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = os.environ.get("COMFYUI_PYTHON", sys.executable)
    command = [python, SCRIPT, str(COMFYUI)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for found in json.loads(done.stdout.splitlines()[-1]):
        print(found["report"])
        assert found["far"] < 1e-3
        assert found["kept"] <= found["bound"] + (64 << 20)  # and what lies outside of the range
        assert found["measured"] <= found["room"] and found["open"]
