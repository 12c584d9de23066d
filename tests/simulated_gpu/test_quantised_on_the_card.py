"""Quantised weights on a card: their parts are copied like other weights, and no tensor of the model stays there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import quantised
import todays
import torch
from on_card import GPU, rates_here
from torch import Tensor, nn

import sd_lowvram
from sd_lowvram import Settings, attached, errors
from sd_lowvram.planning import request
from sd_lowvram.streaming.layers import layers_of
from sd_lowvram.weight_parts import links_of, registered
from sd_lowvram.weights import all_tensors

SIDE = 256
FORMS = {
    **quantised.FORMS,
    "quanto int8": lambda layer: quantised.quantised_by("quanto int8", nn.Sequential(layer))[0],
    "torchao int8": lambda layer: quantised.quantised_by("torchao int8", nn.Sequential(layer))[0],
}


def model(form: str) -> nn.Module:
    torch.manual_seed(0)
    return quantised.exchanged(nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(5))), FORMS[form])


def rows() -> Tensor:
    return torch.randn(3, SIDE, generator=torch.Generator().manual_seed(1))


def held(target: nn.Module) -> list[Tensor]:
    links = (link.value for module in target.modules() for link in links_of(module))
    return [*(tensor for _, _, tensor in registered(*target.modules())), *links, *all_tensors(target)]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_streamed(gpu: Any, form: str, schedule: str) -> None:
    target, x = model(form), rows()
    target(x)
    objects, before = list(map(id, held(target))), [tensor.clone() for tensor in all_tensors(target)]
    with attached(target, Settings(offload="none"), device=GPU):
        assert {tensor.device.type for _, _, tensor in registered(*target.modules())} == {"cuda"}
        wanted = target(x).cpu()
    assert list(map(id, held(target))) == objects
    with gpu.watched(schedule) as seen, attached(target, Settings(offload="layer"), device=GPU):
        assert all(torch.equal(target(x).cpu(), wanted) for _ in range(3))
        assert {tensor.device.type for tensor in held(target)} == {"cpu"}
    assert seen.clean, seen
    assert list(map(id, held(target))) == objects
    assert all(map(torch.equal, all_tensors(target), before))
    assert {tensor.device.type for tensor in held(target)} == {"cpu"}


@pytest.mark.parametrize("form", quantised.FORMS)
@torch.no_grad()
def test_an_error_in_a_call_leaves_nothing_on_the_card(gpu: Any, form: str) -> None:
    target, x = model(form), rows()
    with attached(target, Settings(offload="layer"), device=GPU):
        wanted = target(x).cpu()
        hook = target[3].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target(x)
        hook.remove()
        assert {tensor.device.type for tensor in held(target)} == {"cpu"}
        assert torch.equal(target(x).cpu(), wanted)


def test_gradients_are_refused_by_name(gpu: Any) -> None:
    target = model("inside")
    with attached(target, Settings(offload="layer"), device=GPU):
        with pytest.raises(errors.ConflictError, match=r"0 holds quantised weights.*torch\.no_grad"):
            target(rows().requires_grad_())
        with torch.no_grad():
            target(rows())
    assert len(layers_of({"model": target})) == 5


@pytest.mark.slow(40)
@pytest.mark.parametrize("form", ["inside", "beside", "rows", "quanto int8", "torchao int8"])
def test_a_pipeline_is_planned_and_runs_within_its_budget(gpu: Any, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(request, "rates_of", rates_here)
    pipe, few = todays.flux(), dataclasses.replace(Settings.policy("diffusers-default"), offload=None, vae_tiles=None)
    quantised.exchanged(pipe.transformer, FORMS[form])
    asked: dict[str, Any] = {"width": todays.SIZE, "height": todays.SIZE, "device": GPU, "settings": few}
    with attached(pipe, Settings(offload="none"), device=GPU):
        wanted = todays.picture(pipe).cpu()
    least = sd_lowvram.plan(pipe, vram="1GB", **asked).minimum_vram_bytes
    plan = sd_lowvram.optimize(pipe, vram=f"{int(1.02 * least)} B", **asked)
    with gpu.watched("lazy") as seen, sd_lowvram.measured(pipe) as run:
        picture = todays.picture(pipe).cpu()
    assert plan.settings.offload != "none" and torch.allclose(picture, wanted, atol=1e-5)
    planned = max(stage.held_bytes for stage in plan.stages)
    assert run.peak_bytes <= planned + max(planned // 50, 2 << 20), (planned, run.peak_bytes)
    sd_lowvram.restore(pipe)
    assert seen.clean, seen
    assert {tensor.device.type for tensor in held(pipe.transformer)} == {"cpu"}


@torch.no_grad()
def test_a_model_that_is_on_the_card_goes_back_there_and_its_table_never_leaves(gpu: Any) -> None:
    target, other, x = model("beside"), model("beside"), rows().to(GPU)
    table = quantised._CODE.to(GPU)
    for module in (*target, *other):
        state = module.weight.quant_state
        for each in (state, state.state2):
            for name, value in vars(each).items():
                if isinstance(value, Tensor):
                    setattr(each, name, table if name == "code" else value.to(GPU))
        module.to(GPU)
    wanted, objects = target(x), list(map(id, held(target)))
    with attached(target, Settings(offload="layer"), device=GPU):
        assert torch.equal(target(x), wanted) and torch.equal(other(x), wanted)
        assert table.device.type == "cuda"
    assert list(map(id, held(target))) == objects
    assert {tensor.device.type for tensor in held(target)} == {"cuda"} and torch.equal(target(x), wanted)
