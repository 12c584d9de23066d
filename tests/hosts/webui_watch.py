"""A script for WebUI tests: reports for each step and each decode what it took, and what was planned for it.

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
from sd_lowvram.weights import weight_bytes

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
        took = _times(*begun) if TIMED else _allocated(begun)
        # after a line's end, as the host's bar of progress may stand in it
        print(f"\n[watch] {json.dumps({'stage': stage, **took, 'held': _held(), **_planned(stage)})}", flush=True)


def _times(clock: float, processor: float) -> dict[str, float]:
    return {"seconds": time.perf_counter() - clock, "processor": time.process_time() - processor}


def _allocated(profile: Any) -> dict[str, int]:
    profile.__exit__(None, None, None)
    live = peak = 0
    for _, change in allocator_events(profile):
        live += change
        peak = max(peak, live)
    return {"peak": peak, "unfolded": _unfolded(profile.profiler.kineto_results.experimental_event_tree())}


def _unfolded(events: Any) -> int:
    """The largest unfolded input of a convolution for which this processor has no kernel in its type."""
    largest = 0
    waiting = [(event, ()) for event in events]
    while waiting:
        event, inside = waiting.pop()
        size = getattr(event.extra_fields, "alloc_size", 0)
        if inside == ("aten::_slow_conv2d_forward", "aten::empty"):
            largest = max(largest, size)
        waiting += [(child, (*inside[-1:], event.name)) for child in event.children]
    return largest


def _held() -> int:
    """Bytes of the model's weights, text encoders included."""
    model = shared.sd_model
    forge = getattr(model, "forge_objects", None)
    parts = [model] if forge is None else [forge.unet.model, forge.vae.first_stage_model, forge.clip.cond_stage_model]
    return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.parameters())


def _planned(stage: str) -> dict[str, int]:
    """What the plan in force counts for a stage without the weights: on the device, and what this machine's allocator
    sees, to which maps that wait in host memory are the same; and its steps."""
    current = sys.modules["webui_ext.run"].current()
    found = [one for one in current.plan.stages if one.name == stage] if current else []
    weights = sum(map(weight_bytes, current.anatomy.components.values())) if current else 0
    if not found:
        return {}
    steps = current.plan.request.steps
    return {"planned": found[0].activation_bytes, "seen": found[0].held_bytes - weights, "steps": steps}


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
