"""The picture of a plan: it is drawn, it shows what it should, and what is missing is said."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from sd_lowvram.errors import BadInputError
from sd_lowvram.planning.memory_profile import MeasuredRun, MeasuredStage, overrun
from sd_lowvram.planning.timeline import StageTimeline
from sd_lowvram.plots.memory import memory_figure, memory_png
from sd_lowvram.units import MIB


def stage(name: str, component: str, peak: int, seconds: float, host: int = 0) -> Any:
    sizes = {"peak_bytes": peak * MIB, "weights_bytes": peak * MIB // 2, "host_bytes": host * MIB}
    held = (peak + host) * MIB
    return SimpleNamespace(
        name=name, component=component, seconds=seconds, held_bytes=held, activation_bytes=1, **sizes
    )


def plan(device: str, vram: int = 400) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(width=512, height=512, batch=1, vram=vram * MIB, device=torch.device(device), steps=30),
        predicted=SimpleNamespace(overhead_bytes=0, host_bytes=100 * MIB, peak_bytes=300 * MIB),
        stages=(
            stage("text", "text_encoder", 60, 0.1, 100),
            stage("denoise", "unet", 300, 30.0, 50),
            stage("decode", "vae", 200, 2.0, 100),
        ),
    )


def run(denoise: int = 350) -> MeasuredRun:
    peaks = {"text": 160, "denoise": denoise, "decode": 300}
    names = [("text", "text_encoder"), ("denoise", "unet"), ("denoise", "unet"), ("decode", "vae")]
    curve = ((0.0, 100 * MIB), (0.5, 120 * MIB))
    return MeasuredRun(tuple(MeasuredStage(name, part, 1.0, peaks[name] * MIB, curve) for name, part in names))


def words(figure: Any) -> str:
    texts = [text.get_text() for text in figure.axes[0].texts]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "\n".join(texts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("measured", [None, run()])
def test_a_plan_is_drawn(device: str, measured: Any) -> None:
    timeline = StageTimeline("decode", "vae", (100 * MIB, 200 * MIB), (0, 50 * MIB))
    image = Image.open(io.BytesIO(memory_png(plan(device), measured, (timeline,))))
    assert image.format == "PNG" and image.width > 800
    assert len(image.convert("RGB").getcolors(1 << 20)) > 50


def test_stages_budget_and_measurement_are_named() -> None:
    told = words(memory_figure(plan("cpu"), run()))
    for word in ("text", "denoise (2 steps)", "decode", "budget 400 MiB", "measured", "350 MiB"):
        assert word in told
    assert "planned 2.0 s" in told.split("denoise (2 steps)")[1], "two of the thirty steps"


def test_host_memory_is_drawn_only_where_the_allocator_counts_it() -> None:
    heights = [memory_figure(plan(device)).axes[0].get_ylim()[1] for device in ("cpu", "cuda")]
    assert heights[0] == heights[1], "the budget is higher than both"
    tops = [memory_figure(plan(device, vram=10_000)).axes[0].get_ylim()[1] for device in ("cpu", "cuda")]
    assert tops[0] > tops[1]


def test_a_budget_far_above_does_not_flatten_the_picture() -> None:
    figure = memory_figure(plan("cuda", vram=24_000))
    assert figure.axes[0].get_ylim()[1] < 400 * MIB
    assert "far above" in words(figure)


def test_without_matplotlib_the_remedy_is_told(monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(BadInputError, match=r"sd-lowvram\[plots\]"):
        memory_figure(plan("cpu"))


def test_a_run_that_passed_its_plan_is_told_with_its_stage() -> None:
    assert overrun(plan("cpu"), run(denoise=350)) is None
    assert overrun(plan("cpu"), run(denoise=357)) is None, "8 MiB are allowed"
    message = overrun(plan("cpu"), run(denoise=370))
    assert message is not None
    assert re.match("denoise .*370 MiB, 20 MiB .*350 MiB", message)
    on_gpu = overrun(plan("cuda"), run(denoise=370))
    assert on_gpu is not None
    assert re.match("text .*160 MiB, 100 MiB .*60 MiB", on_gpu), "host memory is not the device's"


def test_a_run_that_passed_its_budget_is_told_before_what_it_allocated() -> None:
    reserved = dataclasses.replace(run().stages[1], reserved_bytes=380 * MIB)
    held = MeasuredRun((*run(denoise=370).stages, reserved))
    within, over = (overrun(plan("cuda", vram=vram), held) for vram in (380, 379))
    assert within is not None and within.startswith("text ")
    assert over is not None and re.search("budget .*380 MiB .* 1 MiB more than 379 MiB", over)
