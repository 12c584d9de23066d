"""What our nodes do with models that our hooks do not know, in a ComfyUI process, as one JSON object by their names.

COMFYUI_PYTHON tests/hosts/comfyui_today.py COMFYUI_DIR
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfyui_inside as inside
import torch


def main(host: str) -> None:
    inside.enter(Path(host))
    nodes = inside.our_nodes()
    found = {kind: _facts(nodes, kind) for kind in inside.TODAY if inside.is_known(kind)}
    told = {
        "models": found,
        "prompts": prompts(nodes),
        "times": times(nodes),
        "refusals": refusals(nodes),
        "layers": layers(),
    }
    print(json.dumps(told))


def _facts(nodes: dict[str, Any], kind: str) -> dict[str, Any]:
    """What Plan, Low VRAM and Report say, and how far pictures are from the stock ones, relative."""
    model, vae = inside.model(kind), inside.autoencoder("flux")
    plan = nodes["LowVRAMPlan"]().plan(model, vae, "1024GB", 128, 128, 1, 20)["result"][0]
    stock = inside.sample(model, steps=2)
    made, _, record, _ = nodes["LowVRAM"]().optimize(model, vae, "1024GB")["result"]
    far = inside.far(stock, inside.sample(made, steps=2))
    report = nodes["LowVRAMReport"]().report(torch.zeros(1, 8, 8, 3), record)["result"][0]
    stage = next(one for one in record.plans["denoise"].stages if one.name == "denoise")
    measured = max(one.peak_bytes for one in record.measured["denoise"])
    compiled = inside.sample(inside.compiled(made), steps=2)
    return {
        "plan": plan,
        "far": far,
        "report": report,
        "planned": stage.held_bytes,
        "measured": measured,
        "compiled": inside.far(stock, compiled),
        "merged": _merged(nodes, kind, model, vae),
        "saved": _saved(made),
        "clean": sorted(vars(model.model).keys() ^ vars(inside.model(kind).model).keys()),
    }


def prompts(nodes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Planned and held bytes of samplings with several prompts, in a budget for all of them in a call and in
    one for fewer, by the way in which there are several."""
    found = {}
    for way in inside.SEVERAL:
        model, vae = inside.model("flux"), inside.autoencoder("flux")
        stock, calls = inside.sample(model, several=way), inside.CALLS[:]
        for room in ("all", "fewer"):
            budget = "1024GB" if room == "all" else f"{found[f'{way}, all']['needed'] - 1}B"
            made, _, record, _ = nodes["LowVRAM"]().optimize(model, vae, budget)["result"]
            far = inside.far(stock, inside.sample(made, several=way))
            plan = record.plans["denoise"]
            stage = next(one for one in plan.stages if one.name == "denoise")
            found[f"{way}, {room}"] = {
                "stock": calls,
                "calls": inside.CALLS[:],
                "far": far,
                "planned": stage.held_bytes,
                "held": max(one.peak_bytes for one in record.measured["denoise"]),
                "needed": stage.reserved_bytes + plan.predicted.overhead_bytes,
                "rows": plan.request.shape.rows,
                "fits": plan.fits,
                "notes": record.notes,
            }
    return found


def times(nodes: dict[str, Any]) -> dict[str, Any]:
    """Calls of the model that were predicted each time that a verdict was shown, and those that there were, by what
    sampled: the host's samplers, without guidance, and windows of frames."""
    from comfy.samplers import SAMPLER_NAMES
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode as Windows

    model, vae = inside.model("flux"), inside.autoencoder("flux")
    made, _, record, _ = nodes["LowVRAM"]().optimize(model, vae, "1024GB")["result"]
    found = {}
    for name in SAMPLER_NAMES:
        with _foretold(record) as told:
            inside.sample(made, sampler=name, steps=6, cfg=1.0, side=8)
        found[name] = {"told": told, "calls": len(inside.CALLS)}
    film = inside.model("wan")
    windows = inside.first_output(Windows, film, 17, 4, "standard_static", 1, False, "pyramid", freenoise=False)
    made, _, record, _ = nodes["LowVRAM"]().optimize(windows, vae, "1024GB")["result"]
    frames = {"samples": torch.zeros(1, 16, 13, inside.SIDE, inside.SIDE)}
    with _foretold(record) as told:
        inside.sample(made, steps=3, start=frames)
    report = nodes["LowVRAMReport"]().report(torch.zeros(1, 8, 8, 3), record)["result"][0]
    stage = next(one for one in record.plans["denoise"].stages if one.name == "denoise")
    held = max(one.peak_bytes for one in record.measured["denoise"])
    found["windows"] = {"told": told, "calls": len(inside.CALLS), "report": report, "notes": record.notes}
    return found | {"held": [held, stage.held_bytes]}


@contextlib.contextmanager
def _foretold(record: Any) -> Iterator[list[float]]:
    """Within the block, what a step's calls are predicted to be whenever a verdict is shown."""
    host = importlib.import_module(".nodes.host", inside.pack_name())
    told: list[float] = []
    with host.replace_attribute(host, "tell", lambda node, text: told.append(record.calls)):
        yield told


def _merged(nodes: dict[str, Any], kind: str, model: Any, vae: Any) -> float:
    """How far a merge of two models that went through our node is from the stock one."""
    from comfy_extras.nodes_model_merging import ModelSubtract

    other = inside.model(kind, seed=1)
    ours = [nodes["LowVRAM"]().optimize(one, vae, "1024GB")["result"][0] for one in (model, other)]
    merge = ModelSubtract().merge
    stock = inside.sample(merge(model, other, 0.5)[0])
    return inside.far(stock, inside.sample(merge(*ours, 0.5)[0]))


def _saved(made: Any) -> bool:
    """Whether ModelSave would write just the model's own weights."""
    saved = made.model.state_dict_for_saving(made.model_state_dict("diffusion_model."))
    return bool(saved) and not any("lowvram" in name for name in saved)


def refusals(nodes: dict[str, Any]) -> dict[str, str]:
    """What is said of a model that cannot be traced, by Low VRAM, by Plan and in a run that goes on all the same; and
    of VAEs that are not served."""
    model, vae = inside.model("wan"), inside.autoencoder("flux")
    unet = model.model.diffusion_model
    kind = type(unet)

    def reads_values(unet: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        assert float(x.sum()) != float("inf")
        return kind.forward(unet, x, *args, **kwargs)

    stock = inside.sample(model)
    unet.__class__ = type("ReadsValues", (kind,), {"forward": reads_values})
    low = nodes["LowVRAM"]().optimize(model, vae, "1024GB")
    told = {"Low VRAM": low["ui"]["text"][0]}
    told["Plan"] = inside.error_of(lambda: nodes["LowVRAMPlan"]().plan(model, vae, "", 128, 128, 1, 20))
    far = inside.far(stock, inside.sample(low["result"][0]))
    told["Report"] = nodes["LowVRAMReport"]().report(torch.zeros(1, 8, 8, 3), low["result"][2])["result"][0]
    unet.__class__ = kind
    told["far"] = str(far)
    other = inside.autoencoder("taesd")
    shown = nodes["LowVRAM"]().optimize(inside.model("sd15"), other, "1024GB")
    told["taesd in Low VRAM"] = shown["ui"]["text"][0] if shown["result"][1] is other else ""
    decode = functools.partial(nodes["LowVRAMVAEDecode"]().decode, {"samples": other}, other, "")
    told["taesd in VAE Decode"] = inside.error_of(decode)
    return told


def layers() -> dict[str, Any]:
    """A fake copy of a model whose layers carry the handles of dynamic VRAM, which cannot be copied."""
    tracing = importlib.import_module(".sd_lowvram.tracing.fake_model", inside.pack_name())
    hosted = importlib.import_module(".nodes.hosted", inside.pack_name())

    class Handle:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("an address range of the card")

    found = {}
    for kind in ("sd15", "lumina2"):
        model = inside.model(kind)
        unet = model.model.diffusion_model
        for module in unet.modules():
            if hasattr(module, "comfy_cast_weights"):
                module._v, module._v_weight, module._v_signature = (Handle(), 0, 1), Handle(), 1
        anatomy = (
            tracing.anatomy_of_components("compvis", {"unet": unet}) if kind == "sd15" else hosted.Traced(model).anatomy
        )
        made = tracing.FakeModel(anatomy, torch.device("cpu")).anatomy.denoiser_module
        found[kind] = [sum(hasattr(one, "_v") for one in each.modules()) for each in (unet, made)]
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
