"""Single facts about our nodes in a ComfyUI process, as one JSON object by their names.

COMFYUI_PYTHON tests/hosts/comfyui_checks.py COMFYUI_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import comfyui_inside as inside
import torch
from comfyui_matrix import ON


def main(host: str) -> None:
    inside.enter(Path(host))
    nodes = inside.our_nodes()
    checks = (autoencoders, pictures, compiled, rows, peaks)
    print(json.dumps({check.__name__: check(nodes) for check in checks}))


def autoencoders(nodes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Relative errors of exact tiles to the stock calls, by kind of VAE, and what was measured and reported."""
    sizes = {"sd15": (4, 24, 20), "flux": (16, 24, 20), "wan": (16, 1, 24, 20), "frames": (16, 3, 12, 10)}
    if inside.knows_flux2():
        sizes["flux2"] = (128, 12, 10)
    kinds = {kind: inside.autoencoder("wan" if kind == "frames" else kind) for kind in sizes}
    return {kind: _distances(nodes, vae, sizes[kind]) for kind, vae in kinds.items()}


def _distances(nodes: dict[str, Any], vae: Any, size: tuple[int, ...]) -> dict[str, float]:
    import nodes as stock

    latents = torch.randn(1, *size, generator=torch.Generator().manual_seed(3))
    settings = nodes["LowVRAMSettings"]().choose(vae_tiles="exact", vae_strip_mib=1)[0]
    decode = nodes["LowVRAMVAEDecode"]().decode
    with torch.inference_mode():
        pixels = stock.VAEDecode().decode(vae, {"samples": latents})[0]
        shown = decode({"samples": latents}, vae, "", settings)
        decoded, record = shown["result"]
        ours, _ = nodes["LowVRAMVAEEncode"]().encode(pixels, vae, "", settings)["result"]
        moments = stock.VAEEncode().encode(vae, pixels)[0]
        low = nodes["LowVRAM"]().optimize(inside.model("sd15"), vae, "", settings)["result"][1]
        untiled = stock.VAEDecodeTiled().decode(low, {"samples": latents}, 64, 16, 16, 4)[0]
    (stage,) = (one for one in record.plans["decode"].stages if one.name == "decode")
    assert shown["ui"]["text"][0].startswith("fits: ")
    return {
        "decode": inside.far(pixels, decoded),
        "encode": inside.far(moments["samples"], ours["samples"]),
        "stock node": inside.far(pixels, untiled),
        "told": stage.held_bytes,
        "measured": max(one.peak_bytes for one in record.measured["decode"]),
    }


def pictures(nodes: dict[str, Any]) -> dict[str, float]:
    """How far samplings with every knob on are from the stock ones, relative, by the kind of picture."""
    noise = torch.Generator().manual_seed(4)
    begun = {"samples": torch.randn(1, 4, inside.SIDE, inside.SIDE, generator=noise)}
    masked = {
        **begun,
        "noise_mask": (torch.rand(1, 1, 8 * inside.SIDE, 8 * inside.SIDE, generator=noise) > 0.5).float(),
    }
    fast = {"cfg": 1.0, "steps": 4}
    found = {}
    for name, stock, run in (
        ("img2img", None, {"start": begun, "denoise": 0.6, "steps": 4}),
        ("inpainting", None, {"start": masked, "steps": 2}),
        ("LCM", "LCM", {**fast, "sampler": "lcm", "scheduler": "sgm_uniform"}),
        ("Turbo", None, {**fast, "sampler": "euler_ancestral", "scheduler": "normal", "steps": 1}),
        ("Lightning", None, {**fast, "scheduler": "sgm_uniform"}),
        ("ControlNet", None, {"control": inside.control_net()}),
    ):
        model = inside.patched(inside.model("sd15"), stock)
        found[name] = inside.far(inside.sample(model, **run), inside.sample(inside.ours(nodes, model, **ON)[0], **run))
    return found


def compiled(nodes: dict[str, Any]) -> dict[str, Any]:
    """How far samplings are from the stock ones where torch.compile is set on the model before our node, or after it,
    by the knobs; and whether the record says that the model runs uncompiled."""
    plain, found = inside.sample(inside.model("sd15"), steps=2), {}
    alone = ("park_skips", "residual_strips", "guidance_in_turn", "transformer_chunks", "feed_forward_chunks")
    for name, knobs in {**{name: {name: ON[name]} for name in alone}, "together": ON, "none": {}}.items():
        for order in ("before", "after"):
            model = inside.model("sd15")
            made, record = inside.ours(nodes, inside.compiled(model) if order == "before" else model, **knobs)
            drawn = inside.sample(made if order == "before" else inside.compiled(made), steps=2)
            found[f"{name}, {order}"] = [
                inside.far(plain, drawn),
                any("runs uncompiled" in note for note in record.notes),
            ]
    return found


def rows(nodes: dict[str, Any]) -> dict[str, list[int]]:
    """Rows of the plan that is shown after a run, and pictures in it: without guidance, with it, and with more."""
    found = {}
    for name, stock, run in (
        ("guided", None, {}),
        ("two at a scale of 1", None, {"cfg": 1.0, "batch": 2}),
        ("one at a scale of 1", None, {"cfg": 1.0}),
        ("perturbed", "PAG", {"batch": 3}),
    ):
        made, record = inside.ours(nodes, inside.patched(inside.model("sd15"), stock))
        inside.sample(made, **run)
        request = record.plans["denoise"].request
        found[name] = [request.shape.rows, request.batch]
    return found


def peaks(nodes: dict[str, Any]) -> dict[str, list[int]]:
    """Bytes that a step was planned to hold, and held as the allocator saw it, by the storage of the weights."""
    found = {}
    for storage in inside.STORAGE:
        made, record = inside.ours(nodes, inside.model("sd15", storage))
        inside.sample(made, side=64)
        plan = next(stage for stage in record.plans["denoise"].stages if stage.name == "denoise")
        found[storage] = [plan.held_bytes, max(one.peak_bytes for one in record.measured["denoise"])]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
