"""What becomes of two MODELs that take turns by our node in a ComfyUI process, as one JSON object.

COMFYUI_PYTHON tests/unets/hosts/comfyui_schedule.py COMFYUI_DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hosts"))
import comfyui_inside as inside

STEPS = 5
TEXTS = {"small first": "small:2,full:3", "full first": "full:3,small:2", "full, small, full": "full:1,small:2,full:2"}


def main(host: str) -> None:
    inside.enter(Path(host))
    nodes = inside.our_nodes()
    checks = (pictures, patched, behind, calls, loads, refusals)
    print(json.dumps({check.__name__: check(nodes) for check in checks}))


def scheduled(nodes: dict[str, Any], own: Any, small: Any, text: str) -> Any:
    return nodes["LowVRAMUNetSchedule"]().schedule(own, small, text)[0]


def pictures(nodes: dict[str, Any]) -> dict[str, Any]:
    """Whether pictures are the same, bit for bit; how far those of turns are from samplings in a row, which round the
    latents between them."""
    own, small = inside.model("sd15"), inside.model("base", seed=1)
    alone, other = (sampled(model) for model in (own, small))
    found: dict[str, Any] = {
        "one model in both places": bool(torch.equal(sampled(scheduled(nodes, own, own, TEXTS["small first"])), alone)),
        "a clone in both places": bool(
            torch.equal(sampled(scheduled(nodes, own, own.clone(), TEXTS["full first"])), alone)
        ),
        "small in all steps": bool(torch.equal(sampled(scheduled(nodes, own, small, f"small:{STEPS}")), other)),
        "two models are two": not torch.equal(alone, other),
    }
    for name, text in TEXTS.items():
        found[name] = far(in_a_row(own, small, text), sampled(scheduled(nodes, own, small, text)))
    found["two pictures, a part of the noise"] = bool(
        torch.equal(
            sampled(scheduled(nodes, own, own, TEXTS["small first"]), batch=2, denoise=0.5),
            sampled(own, batch=2, denoise=0.5),
        )
    )
    found["the model alone afterwards"] = bool(torch.equal(sampled(own), alone))
    return found


def patched(nodes: dict[str, Any]) -> dict[str, Any]:
    """With other weights on the small one, as a LoRA has, and with our hooks on both: how far off, and sites."""
    own, small = inside.model("sd15"), inside.model("base", seed=1).clone()
    name = "diffusion_model.output_blocks.7.0.in_layers.2.weight"
    weight = small.model_state_dict(name)[name]
    small.add_patches({name: ("diff", (torch.ones_like(weight) / 20,))}, 1.0, 1.0)
    text = TEXTS["small first"]
    with_lora = sampled(scheduled(nodes, own, small, text))
    knobs = {"guidance_in_turn": "on", "feed_forward_chunks": 2}
    made = [inside.ours(nodes, each, **knobs) for each in (own, small)]
    asked = counted_loads(made)
    hooked = sampled(scheduled(nodes, made[0][0], made[1][0], text))
    asked = [*asked]
    plain = sampled(scheduled(nodes, own, inside.model("base", seed=1), text))
    wanted = in_a_row(own, small, text)
    sampled(scheduled(nodes, made[0][0], made[1][0], text), batch=2)
    request = made[1][1].plans["denoise"].request
    return {
        "batch and passes of the small one": [request.batch, request.passes],
        "lora": far(wanted, with_lora),
        "without it": far(wanted, plain),
        "hooked": far(wanted, hooked),
        "sites": [record.sites for _, record in made],
        "asked": asked,
    }


def counted_loads(made: list[Any]) -> list[int]:
    """How often our hooks report to the host what each of two models needs, from now on."""
    asked = [0, 0]
    for place, (model, _) in enumerate(made):
        (around,) = model.wrappers["prepare_sampling"]["sd-lowvram"]

        def watched(*args: Any, _place: int = place, _around: Any = around, **kwargs: Any) -> Any:
            asked[_place] += 1
            return _around(*args, **kwargs)

        model.wrappers["prepare_sampling"]["sd-lowvram"] = [watched]
    return asked


def behind(nodes: dict[str, Any]) -> dict[str, Any]:
    """What stands behind our node, or takes part in guidance: how far from samplings in a row in which each model has
    it; how often a function around the own model's calls was called."""
    own, small = inside.model("sd15"), inside.model("base", seed=1)
    text = TEXTS["small first"]
    made, name = scheduled(nodes, own, small, text), "diffusion_model.output_blocks.7.0.in_layers.2.weight"
    weight = own.model_state_dict(name)[name]
    with_lora = [model.clone() for model in (own, made)]
    for model in with_lora:
        model.add_patches({name: ("diff", (torch.ones_like(weight) / 20,))}, 1.0, 1.0)
    found = {
        "lora": far(in_a_row(with_lora[0], small, text), sampled(with_lora[1])),
        "without it": far(in_a_row(own, small, text), sampled(with_lora[1])),
        "a lora for some steps": far(
            in_a_row(own, with_lora[0], text), sampled(scheduled(nodes, own, with_lora[0], text))
        ),
    }
    for stock, before in (("PAG", True), ("PAG", False), ("SAG", False), ("HyperTile", False)):
        each = [inside.patched(model, stock) for model in (own, small)]
        given = scheduled(nodes, each[0], small, text) if before else inside.patched(made, stock)
        wanted, result = in_a_row(*each, text), sampled(given)
        found[f"{stock} {'before' if before else 'behind'}"] = far(wanted, result)
    times = []

    def around(apply: Callable[..., Any], given: dict[str, Any]) -> Any:
        times.append(1)
        return apply(given["input"], given["timestep"], **given["c"])

    wrapped = own.clone()
    wrapped.set_model_unet_function_wrapper(around)
    sampled(scheduled(nodes, wrapped, small, text))
    return {**found, "around": len(times)}


def calls(nodes: dict[str, Any]) -> dict[str, list[int]]:
    """How often each UNet was called, by the sampler."""
    found = {}
    for sampler in ("euler", "heun", "dpmpp_2m", "dpmpp_2m_sde", "euler_ancestral", "uni_pc"):
        own, small = inside.model("sd15"), inside.model("base", seed=1)
        counts = [0, 0]
        for place, model in enumerate((own, small)):
            model.model.diffusion_model.register_forward_pre_hook(counted(counts, place))
        made = sampled(scheduled(nodes, own, small, TEXTS["small first"]), sampler=sampler)
        assert bool(made.isfinite().all())
        found[sampler] = counts
    return found


def counted(counts: list[int], place: int) -> Callable[..., None]:
    def count(*args: Any) -> None:
        counts[place] += 1

    return count


def loads(nodes: dict[str, Any]) -> dict[str, list[list[str]]]:
    """What the host was asked to load, one after the other."""
    from comfy import model_management as host

    own, small = inside.model("sd15"), inside.model("base", seed=1)
    names = {id(own.model): "full", id(small.model): "small"}
    stock, found = host.load_models_gpu, {}
    for name, text in TEXTS.items():
        asked: list[list[str]] = []

        def watched(models: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append([names[id(model.model)] for model in models])  # noqa: B023
            return stock(models, *args, **kwargs)

        host.load_models_gpu = watched
        try:
            sampled(scheduled(nodes, own, small, text))
        finally:
            host.load_models_gpu = stock
        found[name] = asked
    return found


def refusals(nodes: dict[str, Any]) -> dict[str, str]:
    own, small = inside.model("sd15"), inside.model("base", seed=1)
    node, made = nodes["LowVRAMUNetSchedule"](), scheduled(nodes, own, small, TEXTS["small first"])
    deep, _ = inside.ours(nodes, own, deep_cache=3)
    return {
        "steps": error(lambda: sampled(made, steps=7)),
        "another family": error(lambda: node.schedule(own, inside.model("sdxl"), TEXTS["small first"])),
        "another prediction": error(lambda: node.schedule(own, predicting(small), TEXTS["small first"])),
        "no UNet": error(lambda: node.schedule(own, inside.model("flux"), TEXTS["small first"])),
        "twice": error(lambda: node.schedule(made, small, TEXTS["small first"])),
        "optimized after": error(lambda: inside.ours(nodes, made)),
        "planned after": error(lambda: nodes["LowVRAMPlan"]().plan(made, None, "", 128, 128, 1, 20)),
        "deep features": error(lambda: node.schedule(deep, small, TEXTS["full, small, full"])),
        "deep features, one turn each": error(lambda: node.schedule(deep, small, TEXTS["full first"])),
        "after all": error(lambda: sampled(made)),
    }


def predicting(model: Any) -> Any:
    """``model`` as the stock node ModelSamplingDiscrete has it predict velocity."""
    from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

    return ModelSamplingDiscrete().patch(model, "v_prediction", False)[0]


def sampled(
    model: Any, *, sampler: str = "euler", steps: int = STEPS, batch: int = 1, denoise: float = 1.0
) -> torch.Tensor:
    import nodes

    positive, negative = inside.conditions(model)
    latents = {"samples": torch.ones(batch, 4, inside.SIDE, inside.SIDE)}
    with torch.inference_mode():
        (made,) = nodes.KSampler().sample(
            model, 7, steps, 5.0, sampler, "normal", positive, negative, latents, denoise=denoise
        )
    result: torch.Tensor = made["samples"]
    return result


def in_a_row(own: Any, small: Any, text: str) -> torch.Tensor:
    """The same by the stock node for a part of a run, one after the other."""
    import nodes

    models = {"full": own, "small": small}
    latents = {"samples": torch.ones(1, 4, inside.SIDE, inside.SIDE)}
    begin = 0
    for part in text.split(","):
        name, count = part.split(":")
        positive, negative = inside.conditions(own)
        end, first = begin + int(count), begin == 0
        last = end == STEPS
        with torch.inference_mode():
            (latents,) = nodes.KSamplerAdvanced().sample(
                models[name],
                "enable" if first else "disable",
                *(7, STEPS, 5.0, "euler", "normal", positive, negative, latents, begin, end),
                "disable" if last else "enable",
            )
        begin = end
    return latents["samples"]


def error(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm())


if __name__ == "__main__":
    main(*sys.argv[1:])
