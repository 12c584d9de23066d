"""What our hooks cost a step in a real AUTOMATIC1111 at a CFG scale of 1, in a budget that a plain step would break.

    WEBUI_DIR=... [WEBUI_PYTHON=...] [WEBUI_CHECKPOINT=an SD1.5] \\
    PYTHONPATH=.:tests/support python tests/hosts/webui_speed.py OUT.json [--width 64] [--pairs 4] [--size 512]

Pictures without us and with us are made in turn by one server; the ratio is of the medians of all their steps, once by
the clock and once in processor seconds, which what else the machine does changes less. Without WEBUI_CHECKPOINT the
model has all blocks of SD1.5 and random weights, and is narrower: --width channels of the UNet in place of 320.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import webui_data
from webui_data import MODELS, PYTHON, ROOT, WEBUI
from webui_server import Server, serving

MIB = 1 << 20
BELOW = 0.97
"""Of the activations that are planned for a plain step."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--size", type=int, default=512)
    given = parser.parse_args(arguments)
    os.environ["WATCH"] = "time"
    with tempfile.TemporaryDirectory() as place:
        data = webui_data.empty(Path(place))
        webui_data.add_extension(data)
        webui_data.add_script(data, "webui_watch.py")
        checkpoint = data / MODELS / "model.safetensors"
        if "WEBUI_CHECKPOINT" in os.environ:
            checkpoint.symlink_to(Path(os.environ["WEBUI_CHECKPOINT"]).resolve())
        else:
            webui_data.add_checkpoint(data, "model", width=given.width)
        with serving(Path(WEBUI), PYTHON, data, "--ckpt", str(checkpoint)) as server:
            server.ask("/sdapi/v1/options", {"live_previews_enable": False})
            told = compared(server, given.pairs, {"width": given.size, "height": given.size, "cfg_scale": 1})
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, cwd=ROOT, capture_output=True, text=True
    )
    told |= {"commit": commit.stdout.strip(), "checkpoint": os.environ.get("WEBUI_CHECKPOINT", f"width {given.width}")}
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


def compared(server: Server, pairs: int, asked: dict[str, Any]) -> dict[str, Any]:
    """The steps of ``pairs`` pictures without us and as many with us."""
    server.make(steps=2, **asked)
    server.make(steps=2, ours={"offload": "none"}, **asked)
    plain = next(one for one in server.watched()[-2:] if one["stage"] == "denoise")
    budget = (plain["held"] + int(BELOW * plain["planned"])) // MIB
    bare: list[dict[str, Any]] = []
    ours: list[dict[str, Any]] = []
    worst = 0
    for _ in range(pairs):
        one = server.make(steps=2, **asked)
        bare += _steps(server)
        other = server.make(steps=2, ours={"offload": "none", "vram": f"{budget}MB"}, **asked)
        ours += _steps(server)
        worst = max(worst, int(abs(one.picture.astype(int) - other.picture.astype(int)).max()))
    told: dict[str, Any] = {"sites": server.sites(), "budget_mib": budget, "difference_of_255": worst}
    for kind in ("seconds", "processor"):
        medians = [statistics.median(one[kind] for one in steps) for steps in (bare, ours)]
        each = [[round(one[kind], 3) for one in steps] for steps in (bare, ours)]
        told[kind] = {"bare": medians[0], "ours": medians[1], "ratio": medians[1] / medians[0], "steps": each}
    return told


def _steps(server: Server) -> list[dict[str, Any]]:
    return server.watched()[-3:-1]


if __name__ == "__main__":
    main()
