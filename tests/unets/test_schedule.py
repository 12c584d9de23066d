"""Several UNets in one run: the trajectory of a loop written by hand, within the plan, and nothing left behind."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pytest
import torch
from run_log import logged
from torch._subclasses.fake_tensor import FakeTensor

import sd_lowvram
from sd_lowvram import Fidelity, Settings
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.checkpoints.schedulers import set_scheduler
from sd_lowvram.errors import BadInputError, BudgetError
from sd_lowvram.planning.memory_profile import measured
from sd_lowvram.session import attachments
from sd_lowvram.unets.prune import cut_by_names, prune_unet
from sd_lowvram.unets.schedule import scheduled
from sd_lowvram.weights import all_tensors

PLAIN = Settings.policy("diffusers-default")
ROOM = {"vram": "2GB", "device": "cpu"}


@pytest.fixture
def pipe() -> Any:
    made: Any = load_pipeline(None, dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    return made


def smaller(pipe: Any) -> Any:
    return prune_unet(pipe.unet, cut_by_names(pipe.unet.config, drop=["mid"]))


def latents(pipe: Any, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    found: torch.Tensor = pipe(
        "a red apple", num_inference_steps=steps, guidance_scale=4.0, generator=generator, output_type="latent"
    ).images
    return found


@torch.no_grad()
def by_hand(pipe: Any, unet_of_call: list[Any], steps: int) -> torch.Tensor:
    text, nothing = pipe.encode_prompt("a red apple", torch.device("cpu"), 1, True)
    both = torch.cat([nothing, text])
    pipe.scheduler.set_timesteps(steps)
    side = pipe.unet.config.sample_size
    x = torch.randn((1, 4, side, side), generator=torch.Generator().manual_seed(1)) * pipe.scheduler.init_noise_sigma
    for unet, t in zip(unet_of_call, pipe.scheduler.timesteps, strict=True):
        given = pipe.scheduler.scale_model_input(torch.cat([x] * 2), t)
        free, guided = unet(given, t, encoder_hidden_states=both).sample.chunk(2)
        x = pipe.scheduler.step(free + 4.0 * (guided - free), t, x).prev_sample
    return x


def bits(*modules: Any) -> str:
    found = hashlib.sha256()
    for module in modules:
        for name, tensor in module.state_dict().items():
            found.update(f"{name}{tensor.dtype}{tensor.device}".encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("turns", ["ssfff", "fffss", "sfs"])
def test_the_trajectory_is_that_of_a_loop_by_hand(pipe: Any, turns: str) -> None:
    unets = {"s": smaller(pipe), "f": pipe.unet}
    expected = by_hand(pipe, [unets[one] for one in turns], len(turns))
    plain = latents(pipe, len(turns))
    with scheduled(pipe, [(unets[one], 1) for one in turns], settings=PLAIN, **ROOM):
        found = [latents(pipe, len(turns)), latents(pipe, len(turns))]  # a second run begins anew
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
    assert not torch.equal(found[0], plain)


@pytest.mark.parametrize(("scheduler", "steps", "calls"), [("heun", (2, 2), "ssssfff"), ("plms", (2, 3), "sssfff")])
def test_schedulers_that_ask_twice_keep_a_step_whole(
    pipe: Any, scheduler: str, steps: tuple[int, int], calls: str
) -> None:
    """Heun asks twice at every step but the last, plms at the first."""
    set_scheduler(pipe, scheduler)
    unets = {"s": smaller(pipe), "f": pipe.unet}
    expected = by_hand(pipe, [unets[one] for one in calls], sum(steps))
    with scheduled(pipe, [(unets["s"], steps[0]), (unets["f"], steps[1])], settings=PLAIN, **ROOM):
        assert torch.equal(latents(pipe, sum(steps)), expected)


def test_the_own_unet_alone_is_the_plain_run_and_its_plan(pipe: Any) -> None:
    plan = sd_lowvram.optimize(pipe, **ROOM, steps=3)
    expected = latents(pipe, 3)
    sd_lowvram.restore(pipe)
    with scheduled(pipe, [(pipe.unet, 3)], **ROOM) as found:
        assert found.predicted.peak_bytes == plan.predicted.peak_bytes
        assert found.settings == plan.settings and found.fidelity == plan.fidelity != Fidelity.APPROXIMATE
        assert torch.equal(latents(pipe, 3), expected)


@pytest.mark.parametrize("ending", ["whole", "in the middle"])
def test_afterwards_all_is_as_before(pipe: Any, ending: str) -> None:
    small, own, seen = smaller(pipe), pipe.unet, []
    before = bits(own, small, pipe.vae, pipe.text_encoder), dict(pipe.config), set(vars(pipe.scheduler))

    def stop(*_: Any) -> Any:
        seen.append(pipe.unet)
        if ending != "whole":
            raise KeyboardInterrupt
        return {}

    ended = pytest.raises(KeyboardInterrupt) if ending != "whole" else contextlib.nullcontext()
    with ended, scheduled(pipe, [(small, 1), (own, 1)], settings=Settings(offload="layer"), **ROOM):
        assert pipe.unet is small
        pipe("a red apple", num_inference_steps=2, callback_on_step_end=stop, output_type="latent")
    assert seen[0] is own  # the second one has its turn once the first step is made
    assert pipe.unet is own and not attachments(pipe)
    assert "step" not in vars(pipe.scheduler) and "forward" not in {*vars(own), *vars(small)}
    assert bits(own, small, pipe.vae, pipe.text_encoder) == before[0]
    assert dict(pipe.config) == before[1]


def test_the_peak_is_the_larger_one_and_holds(pipe: Any) -> None:
    small = smaller(pipe)
    size = {**ROOM, "settings": PLAIN}
    alone = sd_lowvram.plan(pipe, steps=1, **size)
    waits = sum(tensor.numel() * tensor.element_size() for tensor in all_tensors(small))
    with scheduled(pipe, [(small, 1), (pipe.unet, 1)], **size) as plan:
        assert plan.settings.cuda_graphs is False and plan.fidelity == Fidelity.APPROXIMATE
        stages = {stage.name: stage for stage in plan.stages}
        assert [stage.name for stage in plan.stages] == ["text", "denoise", "decode"]
        assert plan.predicted.peak_bytes == alone.predicted.peak_bytes
        ours = next(stage for stage in alone.stages if stage.name == "denoise")
        assert stages["denoise"].host_bytes > waits > 0 and stages["denoise"].peak_bytes == ours.peak_bytes
        with measured(pipe) as run:
            pipe("a red apple", num_inference_steps=2)
    for stage in run.stages:
        assert stage.peak_bytes <= max(one.held_bytes for one in plan.stages)


def test_each_unet_keeps_its_plan_also_a_leaner_one(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, small, planned = pipe.unet, smaller(pipe), []
    size = {**ROOM, "width": 64, "height": 64}
    with scheduled(pipe, [(small, 1), (own, 1)], **size):
        expected = latents(pipe, 2)

    def full(_: Any, given: Any) -> None:
        if isinstance(given[1], FakeTensor):  # traced for a plan
            return
        planned.append(attachments(pipe)[-1].plan)
        if len(planned) < 3:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.")

    with scheduled(pipe, [(small, 1), (own, 1)], **size):
        hook = own.mid_block.register_forward_pre_hook(full)
        with logged("unet ran out of memory on cpu"):
            first = latents(pipe, 2)
        monkeypatch.setattr("sd_lowvram.api.make_plan", lambda *_: pytest.fail("planned again"))
        second = latents(pipe, 2)
        hook.remove()
    assert [len(plan.fallback_steps) for plan in planned] == [0, 1, 2, 2]  # the small one's turn in between
    for found in (first, second):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("parts", "steps", "message"),
    [
        ([], 1, "at least one"),
        ([("own", 0)], 1, "at least 1"),
        ([("own", True)], 1, "at least 1"),
        ([("other", 1)], 1, "cross_attention_dim.*192"),
        ([("own", 2), ("small", 2)], 5, "4 .*5"),
        ([("text", 1)], 1, "is not a UNet"),
    ],
)
def test_bad_schedules_are_refused(pipe: Any, parts: list[Any], steps: int, message: str) -> None:
    from diffusers import UNet2DConditionModel

    config = {name: value for name, value in pipe.unet.config.items() if not name.startswith("_")}
    unets = {"own": pipe.unet, "small": smaller(pipe), "text": pipe.text_encoder}
    unets["other"] = UNet2DConditionModel.from_config({**config, "cross_attention_dim": 96})
    own = pipe.unet
    turns = [(unets[name], count) for name, count in parts]
    with pytest.raises(BadInputError, match=message), scheduled(pipe, turns, **ROOM):
        latents(pipe, steps)
    assert pipe.unet is own and not attachments(pipe)


@pytest.mark.parametrize("settings", [Settings(deep_cache=2), Settings(cuda_graphs=True)])
def test_what_keeps_a_unets_state_is_refused(pipe: Any, settings: Settings) -> None:
    refused = pytest.raises(BadInputError, match="UNets")
    with refused, scheduled(pipe, [(pipe.unet, 1)], settings=settings, **ROOM):
        pass


def test_host_memory_must_hold_what_waits(pipe: Any) -> None:
    own = pipe.unet
    turns = [(smaller(pipe), 1), (pipe.unet, 1)]
    with pytest.raises(BudgetError), scheduled(pipe, turns, ram="20MB", **ROOM):
        pass
    assert pipe.unet is own and not attachments(pipe)
