"""What it takes a real AUTOMATIC1111 to show in its panel whether a size that is new to it fits.

    WEBUI_DIR=... [WEBUI_PYTHON=...] [WEBUI_CHECKPOINT=an SD1.5] \\
    PYTHONPATH=.:tests/support python tests/hosts/webui_plans.py [benchmarks/webui_plans.md] [--loaded]

The sizes are asked one after the other, as the page asks; the answer is timed in processor seconds of the server, which
what else the machine does changes least. Without WEBUI_CHECKPOINT the model is SD1.5 with random weights.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import random_checkpoint
import webui_data
from webui_data import MODELS, PYTHON, ROOT, WEBUI
from webui_server import Server, serving

from benchmarks.tables import told_as, written
from sd_lowvram.files import table

SIZES = ((256, 256), (512, 512), (640, 512), (768, 768), (1024, 1024))
BUDGET = "4GB"
AIM = 3.0
"""Processor seconds."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "benchmarks" / "webui_plans.md")
    parser.add_argument("--loaded", action="store_true", help="wait until the model is loaded")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        data = webui_data.empty(Path(place))
        webui_data.add_extension(data)
        checkpoint = data / MODELS / "model.safetensors"
        if "WEBUI_CHECKPOINT" in os.environ:
            checkpoint.symlink_to(Path(os.environ["WEBUI_CHECKPOINT"]).resolve())
        else:
            random_checkpoint.write("sd15", checkpoint)
        flags = [] if given.loaded else ["--skip-load-model-at-start"]
        with serving(Path(WEBUI), PYTHON, data, "--ckpt", str(checkpoint), *flags) as server:
            server.ask("/sdapi/v1/refresh-checkpoints", {})
            while given.loaded and "Model loaded" not in server.told():
                assert "failed to load" not in server.told(), server.told()[-4000:]
                time.sleep(1)
            rows = [_asked(server, *size) for size in SIZES]
    machine = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "loaded": given.loaded}
    with told_as("python tests/hosts/webui_plans.py" + " --loaded" * given.loaded):
        written({**machine, "rows": rows}, lines, given.out)


def _asked(server: Server, width: int, height: int) -> dict[str, Any]:
    """What the panel shows for a size, and the processor seconds until it does."""
    config = server.ask("/config")
    named = {one["id"]: one["props"].get("elem_id") for one in config["components"]}
    shown = ["txt2img_sd_lowvram_prediction", "txt2img_sd_lowvram_verdict"]
    asks = ((number, one) for number, one in enumerate(config["dependencies"]))
    number, line = next((number, one) for number, one in asks if [named[out] for out in one["outputs"]] == shown)
    first = {one["id"]: one["props"].get("value") for one in config["components"]}
    chosen = {"width": width, "height": height, "sd_lowvram_enabled-checkbox": True, "sd_lowvram_vram": BUDGET}
    values = [chosen.get((named[one] or "").removeprefix("txt2img_"), first[one]) for one in line["inputs"]]
    before = _processor(server)
    told = server.ask("/run/predict", {"fn_index": number, "data": values, "session_hash": "plans"})["data"]
    return {"size": f"{width}x{height}", "seconds": _processor(server) - before, "told": told[1]}


def _processor(server: Server) -> float:
    spent = psutil.Process(server.pid).cpu_times()
    return spent.user + spent.system


def lines(report: dict[str, Any]) -> list[str]:
    """The table of a report."""
    which = "loaded" if report["loaded"] else "of which the panel has read the file's header: it is not loaded yet"
    rows = [[one["size"], f"{one['seconds']:.1f}", "yes" if one["seconds"] <= AIM else "no"] for one in report["rows"]]
    return [
        "# A new size in AUTOMATIC1111's panel",
        "",
        f"SD1.5 of full width, {which}; a budget of {BUDGET}, preset *exact*, on a CPU. Processor seconds of the",
        "server from the page's question to the answer, the sizes in this order. The first is the first plan",
        "of the process, with the measurement of the processor's rates, which is made once on a machine.",
        f"Measured once each; the machine's load was {report['load']:.0f} on {report['cores']} cores.",
        "",
        *table(["size", "processor seconds", f"at most {AIM:.0f}"], rows),
    ]


if __name__ == "__main__":
    main()
