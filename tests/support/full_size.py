"""The rows of test_families at the size of the real models: ``python tests/support/full_size.py SIDE [ROW...]``.

For each row, or for all, prints one JSON object with the relative error of the picture, and the allocator's peak
next to the planned one in MiB, with plenty of memory and with little. Random weights in float32, two steps, text
encoders of one layer. Takes minutes a row, and 5 GB of memory for SD1.5 or 12 GB for SDXL.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

_REAL = {
    "only_cross_attention": [True, True, True, False],
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 5 * 256 + 1280,
    "time_cond_proj_dim": 256,
}
"""What the rows change of their narrow UNets, as the models that they stand for have it."""


def parts(name: str, **unet: Any) -> dict[str, Any]:
    """What a pipeline is made of, at full size."""
    import tiny

    from sd_lowvram.checkpoints.architectures import architecture, build_components

    config = architecture(name)
    config["unet"] |= {knob: _REAL.get(knob, value) for knob, value in unet.items()}
    for encoder in ("text_encoder", "text_encoder_2"):
        if encoder in config:
            config[encoder]["num_hidden_layers"] = 1
    small = tiny.components(name)
    return {**small, **build_components(config)}


def pipeline(name: str, device: torch.device) -> Any:
    """A pipeline of full size in float16, its weights drawn on ``device`` and in host memory."""
    import tiny

    from sd_lowvram.checkpoints.architectures import architecture, build_components

    built = build_components(architecture(name), torch.float16, str(device))
    parts = {part: torch.nn.Module.to(module, "cpu") for part, module in built.items()}
    torch.cuda.empty_cache()
    return tiny.pipeline(name, **parts)


def enlarged(kind: Any, side: int) -> Any:
    """``kind`` with pictures of ``side`` pixels where the row has small ones; the image encoder's stay its own."""
    import families

    def one(value: Any) -> Any:
        small = isinstance(value, torch.Tensor) and value is not families.SEEN
        return torch.nn.functional.interpolate(value, scale_factor=side // families.SIZE) if small else value

    return dataclasses.replace(kind, options=tree_map(one, kind.options))


def row(name: str, side: int) -> dict[str, Any]:
    import families
    import tiny

    import sd_lowvram
    from sd_lowvram.memory import measured_peak
    from sd_lowvram.session import anatomy_of
    from sd_lowvram.units import MIB
    from sd_lowvram.weights import weight_bytes

    kind = enlarged(families.KINDS[name], side)
    pipe = kind.make()
    once = {"num_inference_steps": 2}
    expected = families.picture(pipe, kind, side, **once)
    weights = weight_bytes(*anatomy_of(pipe).components.values())
    found: dict[str, Any] = {"row": name, "side": side, "weights": weights // MIB}
    vram = 64 << 30
    for label in ("plenty", "little"):
        started = time.perf_counter()
        plan = sd_lowvram.optimize(pipe, vram=f"{vram} B", ram="64GB", width=side, height=side, device="cpu")
        planned = time.perf_counter()
        pictures: list[torch.Tensor] = []
        held = weights + measured_peak(lambda: pictures.append(families.picture(pipe, kind, side, **once)))  # noqa: B023
        found[label] = {
            "planned": max(stage.held_bytes for stage in plan.stages) // MIB,
            "measured": held // MIB,
            "peak": plan.predicted.peak_bytes // MIB,
            "error": tiny.relative_error(pictures[0], expected),
            "seconds": [round(planned - started), round(time.perf_counter() - planned)],
            "settings": {name: value for name, _, value in plan.settings.decided()},
        }
        vram = plan.minimum_vram_bytes
        sd_lowvram.restore(pipe)
    found["restored"] = torch.equal(families.picture(pipe, kind, side, **once), expected)
    return found


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import families

    families.parts = parts
    side = int(sys.argv[1])
    for name in sys.argv[2:] or families.KINDS:
        print(json.dumps(row(name, side)), flush=True)


if __name__ == "__main__":
    main()
