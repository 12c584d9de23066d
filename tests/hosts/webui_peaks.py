"""A script for WebUI tests: prints what the model holds, and the allocator's peak of each step and each decode.

With WATCH=time in the environment: processor seconds in place of the peak.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from modules import script_callbacks, scripts, shared

from sd_lowvram.memory.measured import allocator_events, allocator_profile

TIMED = os.environ.get("WATCH") == "time"
_watched: list[Any] = []


def _begin(*given: Any) -> None:
    gc.collect()
    _watched.append(time.process_time() if TIMED else allocator_profile())
    if not TIMED:
        _watched[-1].__enter__()


def _end(what: str) -> None:
    if _watched:
        told = time.process_time() - _watched.pop() if TIMED else _peak(_watched.pop())
        held = sum(tensor.numel() * tensor.element_size() for tensor in shared.sd_model.parameters())
        print(f"[peaks] {what} {told} beside {held}", flush=True)


def _peak(profile: Any) -> int:
    profile.__exit__(None, None, None)
    live = peak = 0
    for _, change in allocator_events(profile):
        live += change
        peak = max(peak, live)
    return peak


class Peaks(scripts.Script):
    """Watches every generation."""

    def title(self) -> str:
        return "peaks"

    def show(self, is_img2img: bool) -> Any:
        return scripts.AlwaysVisible

    def post_sample(self, p: Any, ps: Any, *args: Any) -> None:
        _begin()

    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _end("decode")


script_callbacks.on_cfg_denoiser(_begin)
script_callbacks.on_cfg_denoised(lambda params: _end("denoise"))
