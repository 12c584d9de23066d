"""Processor seconds of first plans by two checkouts, one after the other; each plan in a process of its own.

    python benchmarks/first_plans.py BEFORE NOW

Both run with this Python. *First*: an empty cache. *Again*: the same request. *New size*: 128 pixels wider, with the
cache of the first. The import of torch, diffusers and transformers is a part of first plans and of new sizes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

MODELS = (("sd15", 512), ("sdxl", 1024), ("flux1-dev", 1024), ("z-image", 2048), ("qwen-image", 1024))
STATED = ("--gpu", "rtx3060", "--ram", "64GB", "--json")


def planned(tree: str, cache: str, model: str, vram: str, width: int, height: int) -> tuple[float, dict[str, Any]]:
    """Processor seconds of one plan, and the plan."""
    sizes = "--vram", vram, "--width", str(width), "--height", str(height)
    environment = os.environ | {"PYTHONPATH": tree, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "sd_lowvram", "plan", "--model", model, *sizes, *STATED]
    made = subprocess.run(command, check=False, cwd=tree, env=environment, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, json.loads(made.stdout)


def main() -> None:
    for model, side in MODELS:
        least = dict[str, int]()
        for budget in ("4 GB", "least + 10 %"):
            for tree in sys.argv[1:]:
                cache = tempfile.mkdtemp()
                vram = f"{int(1.1 * least[tree]) >> 20}MB" if least.get(tree) else "4GB"
                first, plan = planned(tree, cache, model, vram, side, side)
                again, _ = planned(tree, cache, model, vram, side, side)
                new, _ = planned(tree, cache, model, vram, side + 128, side)
                least.setdefault(tree, plan["minimum_vram_bytes"])
                print(f"| {tree} | {model} | {side} | {budget} | {first:.1f} | {again:.1f} | {new:.1f} |", flush=True)


if __name__ == "__main__":
    main()
