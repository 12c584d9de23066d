"""A run recorded stage by stage; the allocator in another process says whether the figures are true."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny
import torch

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.errors import BadInputError
from sd_lowvram.weights import all_tensors, weight_bytes


@pytest.fixture
def pipe() -> Any:
    return families.plain("sd15")


def components(pipe: Any) -> list[Any]:
    return [pipe.text_encoder, pipe.unet, pipe.vae]


def test_stages_of_a_run(pipe: Any) -> None:
    with sd_lowvram.measured(pipe) as run:
        tiny.run(pipe, steps=3)
    names = [(stage.name, stage.component) for stage in run.stages]
    assert names == [("text", "text_encoder"), *[("denoise", "unet")] * 3, ("decode", "vae")]
    assert run.peak_bytes == max(stage.peak_bytes for stage in run.stages) > weight_bytes(*components(pipe))
    assert run.seconds == pytest.approx(sum(stage.seconds for stage in run.stages))
    for stage in run.stages:
        seconds, heights = zip(*stage.curve, strict=True)
        assert max(heights) == stage.peak_bytes
        assert sorted(seconds) == list(seconds)
        assert 0 <= seconds[-1] <= stage.seconds


@pytest.mark.parametrize("name", ["controlnet", "t2i adapter", "ip adapter, sdxl"])
def test_stages_have_the_names_that_plans_give_them(name: str) -> None:
    kind = families.KINDS[name]
    pipe = kind.make()
    plan = sd_lowvram.plan(pipe, vram="1GB", ram="1GB", width=families.SIZE, height=families.SIZE, device="cpu")
    with sd_lowvram.measured(pipe) as run:
        families.picture(pipe, kind)
    assert {(stage.name, stage.component) for stage in run.stages} == {
        (stage.name, stage.component) for stage in plan.stages
    }


def test_nothing_stays_on_the_pipeline(pipe: Any) -> None:
    before = {name: dict(vars(module)) for name, module in pipe.unet.named_modules()}
    with pytest.raises(ZeroDivisionError), sd_lowvram.measured(pipe) as run:
        1 / 0  # noqa: B018
    assert not run.stages
    assert {name: dict(vars(module)) for name, module in pipe.unet.named_modules()} == before


@pytest.mark.parametrize("offload", ["none", "component", "layer"])
def test_what_was_there_before_is_counted_and_its_end_too(pipe: Any, offload: str) -> None:
    """Moving a model's weights into new memory and back ends where it began, in a second recording as well."""
    weights = weight_bytes(*components(pipe))
    copied = max(map(weight_bytes, components(pipe))) if offload == "component" else 0
    with sd_lowvram.attached(pipe, Settings(offload=offload), device="cpu"):
        for _ in range(2):
            with sd_lowvram.measured(pipe) as run:
                tiny.run(pipe)
            left = run.stages[-1].curve[-1][1]
            assert weights <= left < weights + copied + 300_000
            assert run.peak_bytes < weights + copied + 8_000_000


@pytest.mark.slow(6)
def test_addresses_of_earlier_recordings_are_no_matter() -> None:
    """What was allocated in one recording and freed outside of any leaves its size with torch's profiler."""
    for _ in range(6):
        pipe = families.plain("sd15")
        weights = weight_bytes(*components(pipe))
        settings = Settings(offload="component")
        with sd_lowvram.attached(pipe, settings, device="cpu"), sd_lowvram.measured(pipe) as run:
            tiny.run(pipe)
        assert weights <= run.stages[-1].curve[-1][1] < weights + weight_bytes(pipe.vae) + 300_000


def test_a_stage_holds_what_a_caller_makes_in_it(pipe: Any) -> None:
    def hoard(module: Any, args: Any, output: Any) -> None:
        torch.empty(5_000_000).fill_(0)

    with sd_lowvram.measured(pipe) as plain:
        tiny.run(pipe)
    handle = pipe.unet.mid_block.register_forward_hook(hoard)
    with sd_lowvram.measured(pipe) as run:
        tiny.run(pipe)
    handle.remove()
    for before, after in zip(plain.stages, run.stages, strict=True):
        risen = after.peak_bytes - before.peak_bytes
        assert risen > 18_000_000 if after.name == "denoise" else abs(risen) < 200_000


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(BadInputError), sd_lowvram.measured(torch.nn.Linear(2, 2)):
        pass


def test_weights_are_the_same_objects(pipe: Any) -> None:
    before = [id(tensor) for tensor in all_tensors(*components(pipe))]
    with sd_lowvram.measured(pipe):
        tiny.run(pipe, steps=1)
    assert [id(tensor) for tensor in all_tensors(*components(pipe))] == before
