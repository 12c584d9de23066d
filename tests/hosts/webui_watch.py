"""A script for WebUI tests: tells of each step and each decode what it took, beside what was planned for it.

The allocator's peak and what the model holds, in bytes; with WATCH=time in the environment seconds, the clock's and the
processor's, in place of the peak.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

from modules import script_callbacks, scripts, shared

from sd_lowvram.memory.measured import allocator_events, allocator_profile

TIMED = os.environ.get("WATCH") == "time"
_watched: list[Any] = []


def _begin(*given: Any) -> None:
    gc.collect()
    _watched.append((time.perf_counter(), time.process_time()) if TIMED else allocator_profile())
    if not TIMED:
        _watched[-1].__enter__()


def _end(stage: str) -> None:
    if _watched:
        begun = _watched.pop()
        took = _times(*begun) if TIMED else {"peak": _peak(begun)}
        told = {"stage": stage, **took, "held": _held(), "planned": _planned(stage)}
        print(f"[watch] {json.dumps(told)}", flush=True)


def _times(clock: float, processor: float) -> dict[str, float]:
    return {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}


def _peak(profile: Any) -> int:
    profile.__exit__(None, None, None)
    live = peak = 0
    for _, change in allocator_events(profile):
        live += change
        peak = max(peak, live)
    return peak


def _held() -> int:
    """Bytes of the model's weights, text encoders included where the host keeps them with it."""
    model = shared.sd_model
    forge = getattr(model, "forge_objects", None)
    parts = [model] if forge is None else [forge.unet.model, forge.vae.first_stage_model]
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.parameters())


def _planned(stage: str) -> int | None:
    """The activations that the plan in force counts for the stage; None without one."""
    current = sys.modules["webui_ext.run"].current()
    return next((one.activation_bytes for one in current.plan.stages if one.name == stage), None) if current else None


class Watch(scripts.Script):
    """Watches every generation."""

    def title(self) -> str:
        return "watch"

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def post_sample(self, p: Any, ps: Any, *args: Any) -> None:
        _begin()

    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _end("decode")


script_callbacks.on_cfg_denoiser(_begin)
script_callbacks.on_cfg_after_cfg(lambda params: _end("denoise"))
