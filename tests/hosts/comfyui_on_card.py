"""What ComfyUI's dynamic VRAM keeps on a card while our nodes bound it, in a ComfyUI process, as one JSON object.

COMFYUI_PYTHON tests/hosts/comfyui_on_card.py COMFYUI_DIR
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import comfyui_inside as inside
import torch

SIDE = 64


def main(host: str) -> None:
    sys.path[:0] = [host]
    sys.argv = ["main.py"]
    from comfy_aimdo import control

    control.init()
    import comfy.memory_management
    import comfy.model_patcher

    model = inside.model("sdxl")
    vae = inside.autoencoder("sd15")
    control.init_devices([0])
    comfy.memory_management.aimdo_enabled = True
    patcher = comfy.model_patcher.ModelPatcherDynamic(
        model.model, load_device=torch.device("cuda", 0), offload_device=torch.device("cpu")
    )
    nodes = inside.our_nodes()
    bound = importlib.import_module(".nodes.dynamic_vram", inside.pack_name())
    stock = inside.sample(patcher, side=SIDE, steps=2)
    free = _run(nodes, bound, patcher, vae, "", stock)
    half = free["needed"] - free["weights"] // 2
    print(json.dumps([free, _run(nodes, bound, patcher, vae, f"{half} B", stock)]))


def _run(nodes: dict[str, Any], bound: Any, patcher: Any, vae: Any, budget: str, stock: torch.Tensor) -> dict[str, Any]:
    made, _, record, _ = nodes["LowVRAM"]().optimize(patcher, vae, budget)["result"]
    pictures = inside.sample(made, side=SIDE, steps=2)
    weights, plan = bound.range_of(patcher), record.plans["denoise"]
    (stage,) = (one for one in plan.stages if one.name == "denoise")
    return {
        "far": inside.far(stock, pictures),
        "kept": record.kept["denoise"],
        "bound": record.bounds["denoise"],
        "room": plan.request.vram,
        "weights": stage.weights_bytes,
        "needed": stage.reserved_bytes + plan.predicted.overhead_bytes,
        "measured": max(one.reserved_bytes for one in record.measured["denoise"]) + record.paged["denoise"],
        "open": weights.get_watermark() == weights.get_nr_pages(),
        "report": nodes["LowVRAMReport"]().report(torch.zeros(1, 8, 8, 3), record)["result"][0],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
