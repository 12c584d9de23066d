"""The rows of test_families at the size of the real models: ``python tests/support/full_size.py SIDE ROW...``.

For each row prints one JSON object with the relative error of the picture, and the allocator's peak beside the planned
one in MiB, with plenty of memory and with little. Random weights in float32, two steps, text encoders of one layer.
Takes minutes a row, and 5 GB of memory for SD1.5 or 12 GB for SDXL.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch


def parts(name: str, **unet: Any) -> dict[str, Any]:
    """What a pipeline is made of, at full size."""
    import tiny

    from sd_lowvram.checkpoints.architectures import architecture, build_components

    config = architecture(name)
    config["unet"] |= unet
    for encoder in ("text_encoder", "text_encoder_2"):
        if encoder in config:
            config[encoder]["num_hidden_layers"] = 1
    small = tiny.components(name)
    return {**small, **build_components(config)}


def row(name: str, side: int) -> dict[str, Any]:
    import families
    import tiny

    import sd_lowvram
    from sd_lowvram.memory import measured_peak
    from sd_lowvram.session import anatomy_of
    from sd_lowvram.units import MIB
    from sd_lowvram.weights import weight_bytes

    kind = families.KINDS[name]
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
    for name in sys.argv[2:]:
        print(json.dumps(row(name, side)), flush=True)


if __name__ == "__main__":
    main()
