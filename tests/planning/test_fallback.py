"""A call that runs out of memory all the same is made again with a leaner plan."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import families
import pytest
import tiny
import torch
from run_log import logged
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.devices.performance import profile
from sd_lowvram.errors import BudgetError
from sd_lowvram.models import anatomy_of_components
from sd_lowvram.planning import fallback
from sd_lowvram.planning.fallback import Shortage
from sd_lowvram.planning.fallback_steps import AS_BEFORE, ladder
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.request import Request
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import anatomy_of, attachments
from sd_lowvram.weights import first_tensor

SIZE: dict[str, Any] = {"width": 64, "height": 64, "device": "cpu"}
FULL = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Frame:
    """Something in a frame that fails."""


@pytest.fixture(scope="module")
def pipe() -> Any:
    return families.plain("sd15")


@pytest.fixture(scope="module")
def expected(pipe: Any) -> torch.Tensor:
    return tiny.run(pipe)


def fails(module: nn.Module, while_true: Callable[[], bool], error: Exception = FULL) -> tuple[Any, list[Any]]:
    """Have ``module`` run out of memory while that holds; returns the hook, and references into frames that failed."""
    frames: list[Any] = []

    def full(_: Any, given: Any) -> None:
        if isinstance(first_tensor(given), FakeTensor):
            return
        assert not any(frame() for frame in frames), "a failed frame lives on while the call is made again"
        if while_true():
            held = Frame()
            frames.append(weakref.ref(held))
            raise type(error)(str(error))

    return module.register_forward_pre_hook(full), frames


PARTS: dict[str, Callable[[Any], nn.Module]] = {
    "unet": lambda pipe: pipe.unet.mid_block,
    "vae": lambda pipe: pipe.vae.decoder.mid_block,
    "text_encoder": lambda pipe: [each for each in pipe.text_encoder.modules() if isinstance(each, nn.LayerNorm)][-1],
}


@pytest.mark.parametrize("component", PARTS)
def test_the_call_is_made_again_as_before_when_what_was_cached_is_given_up(pipe: Any, component: str) -> None:
    first = sd_lowvram.optimize(pipe, vram="1GB", **SIZE)
    wanted = tiny.run(pipe)
    hook, frames = fails(PARTS[component](pipe), lambda: not frames)
    try:
        with logged(f"{component} ran out of memory on cpu with a plan of .*as before"):
            picture = tiny.run(pipe)
    finally:
        hook.remove()
    (again,) = attachments(pipe)
    assert torch.equal(picture, wanted)
    assert [step.name for step in again.plan.fallback_steps] == [AS_BEFORE]
    assert again.plan.settings == first.settings and again.plan.fallback_steps[0].told in again.plan.reasons
    sd_lowvram.restore(pipe)


@pytest.mark.parametrize("component", PARTS)
def test_the_next_leaner_plan_is_tried_with_the_same_latents(pipe: Any, expected: torch.Tensor, component: str) -> None:
    first = sd_lowvram.optimize(pipe, vram="1GB", **SIZE)
    hook, frames = fails(PARTS[component](pipe), lambda: len(frames) < 2)
    try:
        with logged(f"{component} ran out of memory on cpu with a plan of .*it continues with"):
            picture = tiny.run(pipe)
    finally:
        hook.remove()
    (again,) = attachments(pipe)
    assert len(frames) == 2 == len(again.plan.fallback_steps)
    assert again.plan.predicted.peak_bytes < first.predicted.peak_bytes
    assert again.plan.request.vram < first.request.vram
    assert again.plan.minimum_vram_bytes == first.minimum_vram_bytes  # with all knobs, though fewer were open
    assert tiny.relative_error(picture, expected) < 1e-4
    assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
    sd_lowvram.restore(pipe)
    assert "forward" not in vars(pipe.unet)


def on_a_card(pipe: Any, monkeypatch: pytest.MonkeyPatch, approximate: bool = False) -> list[Plan]:
    """A plan for a card, and all that come after it while each of them runs out of memory."""
    monkeypatch.setattr(fallback, "_device_bytes", lambda plan: math.inf)
    anatomy = anatomy_of(pipe)
    asked = Request(128, 128, 1, 1 << 30, 1 << 30, torch.device("cuda"), profile("rtx3060"))
    plans = [make_plan(anatomy, asked, Settings(), approximate)]
    make = functools.partial(make_plan, anatomy)
    with pytest.raises(BudgetError):
        while len(plans) < 40:
            plans.append(fallback.leaner(plans[-1], Shortage("the run", of_host=False), Settings(), make))
    return plans


def test_the_rungs_come_in_their_order_and_touch_nothing_of_later_ones(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = on_a_card(pipe, monkeypatch)
    fallback_steps = [step.name for step in plans[-1].fallback_steps]
    names = [AS_BEFORE, *(name for name, _ in ladder(Settings(), Settings(), of_host=False))]
    assert fallback_steps[0] == AS_BEFORE and {"parked maps", "smaller ring"} <= set(
        fallback_steps
    )  # those that free something
    assert [plan.fallback_steps for plan in plans] == [
        plans[-1].fallback_steps[:number] for number in range(len(plans))
    ]
    for before, after in itertools.pairwise(plans):
        changed = {name for name, value in after.settings.as_dict().items() if value != getattr(before.settings, name)}
        step = names.index(after.fallback_steps[-1].name)
        later = {"parked maps": {"offload", "weights_mib"}, "smaller strips": {"offload", "weights_mib", "park_skips"}}
        assert not changed & later.get(names[step], set())
        assert (after.predicted.reserved_bytes < before.predicted.reserved_bytes) == (step > 0)


@pytest.mark.slow(15)
def test_what_was_lossless_stays_so(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = on_a_card(pipe, monkeypatch, approximate=True)
    precisions = {plan.settings.precision for plan in plans}, {plan.settings.weight_storage for plan in plans}
    assert len(plans) > 3 and all(len(each) == 1 for each in precisions)


@pytest.mark.slow(6)
def test_of_host_memory_weights_in_their_file_give_theirs_up_first() -> None:
    config = tiny.config("sd15")
    config["unet"] |= {"block_out_channels": [64, 128, 256, 256]}  # larger than the ring
    anatomy = anatomy_of_components("diffusers", build_components(config, torch.float16, "meta", only=("unet",)))
    asked = Request(64, 64, 1, 1 << 30, 1 << 30, torch.device("cuda"), profile("rtx3060"))
    fixed = Settings(offload="layer")
    plans = [make_plan(anatomy, asked, fixed)]
    make = functools.partial(make_plan, anatomy)
    for _ in range(2):
        plans.append(fallback.leaner(plans[-1], Shortage("unet", of_host=True), fixed, make))
    first, again, less = (plan.predicted.host_bytes for plan in plans)
    assert [step.name for step in plans[2].fallback_steps] == [AS_BEFORE, "weights from their file"]
    assert max(stage.least_host_bytes for stage in plans[0].stages) == less < again == first


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc"), None], ids=repr)
def test_host_memory_that_is_full_is_told_by_torchs_and_pythons_errors(
    pipe: Any, expected: torch.Tensor, error: Exception | None
) -> None:
    if error is None:
        with pytest.raises(RuntimeError) as refused:
            torch.empty(1 << 50, dtype=torch.uint8)
        error = refused.value
    sd_lowvram.optimize(pipe, vram="1GB", **SIZE)
    hook, frames = fails(pipe.unet.mid_block, lambda: not frames, error)
    try:
        with logged("unet ran out of memory"):
            picture = tiny.run(pipe)
    finally:
        hook.remove()
    assert tiny.relative_error(picture, expected) < 1e-4
    sd_lowvram.restore(pipe)


def test_plans_grow_leaner_until_one_fits(pipe: Any, expected: torch.Tensor) -> None:
    first = sd_lowvram.optimize(pipe, vram="1GB", **SIZE)
    most = first.minimum_vram_bytes + (first.predicted.peak_bytes - first.minimum_vram_bytes) // 3

    def too_much() -> bool:
        return attachments(pipe)[0].plan.predicted.peak_bytes > most

    hook, frames = fails(pipe.unet.mid_block, too_much)
    try:
        with logged("ran out") as told:
            picture = tiny.run(pipe)
    finally:
        hook.remove()
    assert len(told) == len(frames) > 1
    assert not too_much()
    assert tiny.relative_error(picture, expected) < 1e-4
    sd_lowvram.restore(pipe)


def test_where_nothing_is_leaner_that_is_told_and_what_is_attached_stays(pipe: Any, expected: torch.Tensor) -> None:
    least = sd_lowvram.plan(pipe, vram="1GB", **SIZE).minimum_vram_bytes
    plan = sd_lowvram.optimize(pipe, vram=f"{least} b", **SIZE)
    hook, frames = fails(pipe.unet.mid_block, lambda: len(frames) < 2)
    try:
        with (
            logged("ran out"),
            pytest.raises(BudgetError, match="unet "),
        ):
            tiny.run(pipe)
    finally:
        hook.remove()
    assert attachments(pipe)[0].plan.settings == plan.settings
    assert tiny.relative_error(tiny.run(pipe), expected) < 1e-4
    sd_lowvram.restore(pipe)


def test_other_errors_are_the_callers(pipe: Any) -> None:
    plan = sd_lowvram.optimize(pipe, vram="1GB", **SIZE)
    hook, frames = fails(pipe.unet.mid_block, lambda: True, RuntimeError("another one"))
    with pytest.raises(RuntimeError, match="another one"):
        tiny.run(pipe)
    hook.remove()
    assert len(frames) == 1 and attachments(pipe)[0].plan is plan
    sd_lowvram.restore(pipe)


def test_weights_that_do_not_fit_after_all(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd_lowvram.hooks.parking import offload

    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(offload, "place", full)
    with logged("the move of the weights ran out of memory"):
        plan = sd_lowvram.optimize(pipe, vram="1GB", **SIZE)
    assert plan.settings.offload != "none" and attachments(pipe)[0].plan is plan
    sd_lowvram.restore(pipe)


@pytest.mark.parametrize("verb", ["decode", "encode"])
def test_an_autoencoder_alone(pipe: Any, verb: str) -> None:
    given = torch.rand(1, 4, 16, 16) if verb == "decode" else torch.rand(1, 3, 128, 128)
    call = getattr(sd_lowvram, verb)
    expected = call(pipe.vae, given, vram="1GB")
    hook, frames = fails(pipe.vae.get_submodule(f"{verb}r.mid_block"), lambda: len(frames) < 2)
    try:
        with logged("the autoencoder ran out of memory"):
            made = call(pipe.vae, given, vram="1GB", settings=Settings())
    finally:
        hook.remove()
    assert tiny.relative_error(made, expected) < 1e-4
    assert "forward" not in vars(pipe.vae)
