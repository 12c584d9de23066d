"""One VAE's decode in a ComfyUI process, by the stock nodes and by ours, as one JSON object.

COMFYUI_PYTHON tests/hosts/comfyui_decoding.py COMFYUI_DIR KIND WIDTH SIZE...

SIZE is that of the latents without the batch: channels, [frames,] height, width.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfyui_inside as inside
import torch
from torch import Tensor

TILES = {"512": (512, 64), "64": (64, 16)}
"""Side and overlap in pixels of VAE Decode (Tiled): as it stands there, and the least that it takes."""


def main(host: str, kind: str, width: str, *size: str) -> None:
    inside.enter(Path(host))
    import comfyui_version

    import nodes as stock

    ours = inside.our_nodes()["LowVRAMVAEDecode"]().decode
    vae = inside.autoencoder(kind, width=int(width))
    weights = sum(one.numel() * one.element_size() for one in vae.first_stage_model.parameters())
    samples = {"samples": torch.randn(1, *map(int, size), generator=torch.Generator().manual_seed(3))}
    plain, row = _timed(lambda: stock.VAEDecode().decode(vae, samples)[0])
    rows = {"plain": row}
    for name, tile in TILES.items():
        made, row = _timed(lambda tile=tile: stock.VAEDecodeTiled().decode(vae, samples, *tile)[0])
        rows[f"tiles {name}"] = row | _apart(made, plain)
    for name, budget in (("as tiles 512", weights + rows["tiles 512"]["bytes"]), ("least", 1 << 20)):
        begun = time.process_time()
        with torch.inference_mode():
            made, record = ours(samples, vae, f"{budget} b")["result"]  # it measures what it holds by itself
        seconds = time.process_time() - begun
        held = max(one.peak_bytes for one in record.measured["decode"])
        rows[name] = {"bytes": held, "seconds": seconds, **_apart(made, plain)}
    print(json.dumps({"rows": rows, "torch": torch.__version__, "host": comfyui_version.__version__}))


def _timed(decode: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Pixels, bytes above what was held before, and processor seconds, those of watching the allocator included."""
    found: list[Any] = []
    begun = time.process_time()
    measured_peak = importlib.import_module(".sd_lowvram.memory", inside.pack_name()).measured_peak
    with torch.inference_mode():
        peak = measured_peak(lambda: found.append(decode()))
    return found[0], {"bytes": peak, "seconds": time.process_time() - begun}


def _apart(made: Tensor, plain: Tensor) -> dict[str, float]:
    apart = (made.double() - plain.double()).abs()
    return {"largest": float(apart.max()), "mean": float(apart.mean())}


if __name__ == "__main__":
    main(*sys.argv[1:])
