"""Our exact VAE Decode next to ComfyUI's own tiled one, in a real ComfyUI's process.

COMFYUI_DIR=... [COMFYUI_PYTHON=...] \\
PYTHONPATH=.:tests/hosts python tests/hosts/comfyui_decodes.py [benchmarks/comfyui_decodes.md]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import rows_table, told_as, written
from sd_lowvram.units import format_size

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
VAES = (
    ("SD, SDXL", "sd15", 32, (4, 80, 80)),
    ("SD3, FLUX.1", "flux", 32, (16, 80, 80)),
    ("FLUX.2", "flux2", 32, (128, 40, 40)),
    ("Qwen-Image", "wan", 16, (16, 1, 80, 80)),
    ("Wan, 5 frames", "wan", 16, (16, 2, 40, 72)),
)
"""What people decode with them, the host's class, channels of its widest maps, and the size of the latents."""
WAYS = {
    "plain": "VAE Decode, untiled",
    "tiles 512": "VAE Decode (Tiled), 512, overlap 64",
    "tiles 64": "VAE Decode (Tiled), 64, overlap 16",
    "as tiles 512": "ours, in what 512 held",
    "least": "ours, in the least that it takes",
}


def main(arguments: Sequence[str]) -> None:
    out = Path(arguments[0]) if arguments else ROOT / "benchmarks" / "comfyui_decodes.md"
    host, python = os.environ["COMFYUI_DIR"], os.environ.get("COMFYUI_PYTHON", sys.executable)
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for name, kind, width, size in VAES:
        command = [python, str(HERE / "comfyui_decoding.py"), host, kind, str(width), *map(str, size)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "OMP_NUM_THREADS": "1"
        }
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        facts = json.loads(done.stdout.splitlines()[-1])
        rows += [{"vae": name, "way": WAYS[way]} | row for way, row in facts.pop("rows").items()]
    with told_as("python tests/hosts/comfyui_decodes.py"):
        written({"host": facts["host"], "their_torch": facts["torch"], "rows": rows}, lines, out)


def _of_255(name: str, row: dict[str, Any]) -> str:
    if name not in row:
        return ""
    off = 255 * row[name]
    return f"{off:.0f}" if off >= 10 else f"{off:.2g}"


_COLUMNS = (
    ("VAE of", "{vae}"),
    ("decode", "{way}"),
    ("held", lambda row: format_size(row["bytes"])),
    ("processor seconds", "{seconds:.1f}"),
    ("off at most, of 255", lambda row: _of_255("largest", row)),
    ("off on average", lambda row: _of_255("mean", row)),
)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The table of a report."""
    yield "# Our exact decode next to ComfyUI's own tiled decode"
    yield ""
    yield (
        f"ComfyUI {report['host']} with torch {report['their_torch']}, in fp32 on a CPU with one thread: 640x640, "
        "of Wan 576x320. Its own classes with random weights, a quarter as wide as real ones (Qwen-Image's and "
        "Wan's a sixth), which hold more. *Held* is the most bytes above weights and latents, measured; on a CPU "
        "that counts what ours parks in host memory, too. The seconds are the processor's, planning and measuring "
        "included; *off* is the distance of pixels from the untiled decode's. Random weights draw noise: how much of "
        "a tile's error is seen in a picture they do not tell."
    )
    yield ""
    yield from rows_table(_COLUMNS, report["rows"])


if __name__ == "__main__":
    main(sys.argv[1:])
