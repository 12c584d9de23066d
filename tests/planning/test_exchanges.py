"""A model that comes in place of a planned one is planned by the next call, or refused there by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import compvis
import pytest
import tiny
import torch
from families import KINDS, parts, picture, plain
from torch import nn

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.errors import BudgetError, ConflictError, UnsupportedModelError
from sd_lowvram.memory import measured_peak
from sd_lowvram.session import attachments
from sd_lowvram.units import MIB
from sd_lowvram.weights import weight_bytes

PLENTY = {"vram": "1GB", "ram": "1GB", "width": 64, "height": 64, "device": "cpu"}
EXCHANGES: dict[str, Callable[[Any, str, Any], None]] = {
    "assigned": setattr,
    "registered": lambda pipe, name, part: pipe.register_modules(**{name: part}),
}
ENTRIES = {"forward", "decode", "encode"}


@pytest.fixture
def pipe() -> Any:
    return plain("sd15")


def other(name: str) -> Any:
    return parts("sd15", seed=1)[name]


def carries_hooks(part: nn.Module) -> bool:
    return any(vars(module).keys() & ENTRIES for module in part.modules())


def embedded(pipe: Any) -> torch.Tensor:
    """A step and a decode of a call that brings its prompt as embeddings."""
    text = torch.randn(2, 77, 32, generator=torch.Generator().manual_seed(0))
    options = {"width": 64, "height": 64, "num_inference_steps": 1, "output_type": "pt"}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return pipe(prompt_embeds=text[:1], negative_prompt_embeds=text[1:], generator=generator, **options).images


@pytest.mark.parametrize(
    ("name", "exchange", "call"),
    [
        ("unet", "assigned", embedded),
        ("unet", "registered", tiny.run),
        ("vae", "assigned", embedded),
        ("text_encoder", "assigned", tiny.run),
    ],
)
def test_a_part_in_place_of_another_is_planned_by_the_next_call(
    pipe: Any, name: str, exchange: str, call: Callable[[Any], torch.Tensor]
) -> None:
    sd_lowvram.optimize(pipe, settings=Settings(offload="layer", attention="sliced"), **PLENTY)
    old, new = getattr(pipe, name), other(name)
    EXCHANGES[exchange](pipe, name, new)
    planned = call(pipe)
    assert carries_hooks(new)
    assert not carries_hooks(old)
    sd_lowvram.restore(pipe)
    assert tiny.relative_error(planned, call(pipe)) < 1e-4
    assert not carries_hooks(new)
    assert not vars(pipe).keys() & {"check_inputs", "_sd_lowvram", "_sd_lowvram_slots"}


def test_a_call_by_hand_of_one_part_plans_another(pipe: Any) -> None:
    sd_lowvram.optimize(pipe, **PLENTY)
    pipe.vae = other("vae")
    with torch.no_grad():
        pipe.unet(torch.zeros(1, 4, 8, 8), torch.tensor(1), torch.zeros(1, 77, 32))
    assert carries_hooks(pipe.vae)


def test_the_budget_holds_for_what_came(pipe: Any) -> None:
    plan = sd_lowvram.plan(pipe, **PLENTY)
    budget = plan.minimum_vram_bytes
    sd_lowvram.optimize(pipe, **{**PLENTY, "vram": f"{budget} B"})
    pipe.unet = other("unet")
    tiny.run(pipe, steps=1)
    (now,) = attachments(pipe)
    assert now.plan.request.vram == budget
    held = weight_bytes(*now.anatomy.components.values()) + measured_peak(lambda: tiny.run(pipe, steps=1))
    planned = max(stage.held_bytes for stage in now.plan.stages)
    assert held <= planned + max(planned // 50, 2 * MIB)


def test_what_does_not_fit_is_refused_before_its_first_step(pipe: Any) -> None:
    plan = sd_lowvram.plan(pipe, **PLENTY)
    sd_lowvram.optimize(pipe, **{**PLENTY, "vram": f"{plan.minimum_vram_bytes} B"})
    before, steps = pipe.unet, []
    pipe.unet = parts("sd15", block_out_channels=[64, 512])["unet"]
    pipe.unet.register_forward_pre_hook(lambda unet, _: steps.append(unet))  # on copies it is called by a plan, too
    with pytest.raises(BudgetError):
        tiny.run(pipe, steps=1)
    assert pipe.unet not in steps
    pipe.unet = before
    assert torch.isfinite(tiny.run(pipe, steps=1)).all()


def test_what_cannot_be_planned_is_refused_by_name(pipe: Any) -> None:
    sd_lowvram.optimize(pipe, **PLENTY)
    before, pipe.vae = pipe.vae, nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="vae: Linear"):
        tiny.run(pipe, steps=1)
    pipe.vae = before
    assert torch.isfinite(tiny.run(pipe, steps=1)).all()


def test_a_part_with_a_plan_of_its_own_is_refused_until_that_is_restored(pipe: Any) -> None:
    lender = plain("sd15", seed=1)
    sd_lowvram.optimize(pipe, settings=Settings(weight_storage="int8"), **PLENTY)
    sd_lowvram.optimize(lender, settings=Settings(offload="layer"), **PLENTY)
    pipe.unet = lender.unet
    with pytest.raises(ConflictError, match=r"unet.*StableDiffusionPipeline.*restore\(\)"):
        tiny.run(pipe, steps=1)
    sd_lowvram.restore(lender)
    expected = copy.deepcopy(lender.unet)
    planned = tiny.run(pipe, steps=1)
    assert carries_hooks(pipe.unet)
    sd_lowvram.restore(pipe)
    pipe.unet = expected
    assert 0 < tiny.relative_error(planned, tiny.run(pipe, steps=1)) < 0.05


def test_a_controlnet_in_place_of_another_is_planned() -> None:
    kind = KINDS["controlnet"]
    pipe = kind.make()
    sd_lowvram.optimize(pipe, settings=Settings.smallest(), **PLENTY)
    old, pipe.controlnet = pipe.controlnet, copy.deepcopy(kind.make().controlnet)
    planned = picture(pipe, kind)
    assert carries_hooks(pipe.controlnet)
    assert not carries_hooks(old)
    sd_lowvram.restore(pipe)
    assert tiny.relative_error(planned, picture(pipe, kind)) < 1e-4


def test_a_scheduler_in_place_of_another_and_a_part_less_keep_the_plan() -> None:
    from diffusers import EulerDiscreteScheduler

    pipe = plain("sd15")
    plan = sd_lowvram.optimize(pipe, **PLENTY)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.text_encoder = None
    embedded(pipe)
    assert attachments(pipe)[0].plan is plan


def test_an_autoencoder_in_a_compvis_shell_is_planned() -> None:
    pytest.importorskip("ldm")
    shell = compvis.LatentDiffusion()
    sd_lowvram.optimize(shell, **PLENTY)
    shell.first_stage_model = compvis.vae()
    with torch.no_grad():
        shell.model.diffusion_model(*compvis.inputs(32, size=(8, 8)))
    assert carries_hooks(shell.first_stage_model)
    sd_lowvram.restore(shell)
    assert not carries_hooks(shell.first_stage_model)
