"""Weights in several tensors: streamed in their own bytes, the bits of a resident run, the same objects after it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import quantised
import todays
import torch
from torch import Tensor, nn

from sd_lowvram import Settings, attached
from sd_lowvram.compat.private import FakeTensor
from sd_lowvram.errors import ConflictError
from sd_lowvram.streaming.layers import layers_of
from sd_lowvram.tracing import trace
from sd_lowvram.tracing.fake_tensors import fakes_of
from sd_lowvram.weight_parts import links_of, parts_of, registered
from sd_lowvram.weights import all_tensors, weight_bytes

WAYS = {
    "none": Settings(offload="none"),
    "layer": Settings(offload="layer"),
    "layers split": Settings(offload="layer", split_layers=True),
    "halves": Settings(offload="halves"),
    "component": Settings(offload="component"),
}
SIDE = 256
RARE = ("twice inside", "beside", "rows")


def model(form: str, layers: int = 5) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=number % 2 == 0) for number in range(layers)))
    return quantised.exchanged(made, quantised.FORMS[form])


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, SIDE, generator=torch.Generator().manual_seed(1))


def held(target: nn.Module) -> list[Tensor]:
    """All objects in which weights are."""
    links = (link.value for module in target.modules() for link in links_of(module))
    return [*(tensor for _, _, tensor in registered(*target.modules())), *links, *all_tensors(target)]


def bits(target: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in all_tensors(target)]


def equal(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(torch.equal, before, after))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", quantised.FORMS)
@torch.no_grad()
def test_a_run_has_the_bits_of_a_resident_one(form: str, way: str) -> None:
    target, x = model(form), rows()
    wanted = model(form)(x)
    objects, before = list(map(id, held(target))), bits(target)
    with attached(target, WAYS[way]):
        assert all(torch.equal(target(x), wanted) for _ in range(3))
    assert list(map(id, held(target))) == objects
    assert equal(bits(target), before) and all(tensor.device.type == "cpu" for tensor in held(target))
    assert torch.equal(target(x), wanted)


@pytest.mark.parametrize("form", quantised.FORMS)
def test_its_bytes_are_those_of_its_parts_each_once(form: str) -> None:
    target = model(form, layers=1)
    weight, state = target[0].weight, getattr(target[0].weight, "quant_state", None)
    beside = [weight.SCB] if form == "rows" else []
    if state is not None:
        beside = [state.absmax, state.code, state.offset, state.state2.absmax]  # both have the same code
    own = [weight] if form in ("rows", "beside") else parts_of(weight)
    expected = sum(tensor.nbytes for tensor in (*own, *beside, target[0].bias))
    assert weight_bytes(target) == expected < 4 * SIDE * SIDE / 2
    assert len({id(layer.module) for layer in layers_of({"model": target})}) == 1


@torch.no_grad()
def test_a_table_that_models_share_is_never_written_or_moved() -> None:
    seen: list[bool] = []

    class Looking(quantised.BesideLinear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.quant_state.code is table)
            return super().forward(x)

    target, x = model("beside"), rows()
    table = target[0].weight.quant_state.code
    where, writes = table.data_ptr(), table._version
    target[2].__class__ = Looking
    with attached(target, WAYS["layer"]):
        target(x)
        assert seen == [False] and target[2].weight.quant_state.code is not table
    assert target[2].weight.quant_state.code is table
    assert table.data_ptr() == where and table._version == writes


@torch.no_grad()
def test_threads_stream_models_that_share_a_table() -> None:
    targets, x = [model("beside"), model("beside"), model("inside")], rows()
    wanted = [target(x) for target in targets]
    wrong: list[str] = []

    def again(number: int) -> None:
        with torch.no_grad(), attached(targets[number], WAYS["layer"]):
            wrong.extend("bits" for _ in range(20) if not torch.equal(targets[number](x), wanted[number]))

    threads = [threading.Thread(target=again, args=(number,)) for number in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("form", quantised.FORMS)
@torch.no_grad()
def test_an_error_in_a_call_leaves_the_model_as_it_was(form: str) -> None:
    target, x = model(form), rows()
    target(x)
    wanted, objects, before = target(x), list(map(id, held(target))), bits(target)
    hook = target[3].register_forward_pre_hook(lambda module, args: 1 / 0)
    with attached(target, WAYS["layer"]):
        with pytest.raises(ZeroDivisionError):
            target(x)
        hook.remove()
        assert form == "beside" or list(map(id, held(target))) == objects
        assert torch.equal(target(x), wanted)
    assert list(map(id, held(target))) == objects and equal(bits(target), before)


@torch.no_grad()
def test_parts_that_others_exchange_between_calls_are_seen() -> None:
    target, x = model("inside"), rows()
    with attached(target, WAYS["layer"]):
        target(x)
        weight = target[1].weight
        weight.data8 = weight.data8.flip(0)
        made = target(x)
    assert torch.equal(target(x), made) and weight.data8.data_ptr() == target[1].weight.data8.data_ptr()


@torch.no_grad()
def test_a_layer_that_packs_its_weight_anew_keeps_it() -> None:
    class Packing(quantised.BesideLinear):
        def forward(self, x: Tensor) -> Tensor:
            if self.weight.quant_state.blocksize == 64:
                self.weight.data = self.weight.data.clone().view(-1, 1)
                self.weight.quant_state.absmax = self.weight.quant_state.absmax + 0
                self.weight.quant_state.blocksize = 32
            self.weight.data = self.weight.data.view(SIDE, SIDE)
            made = super().forward(x)
            self.weight.data = self.weight.data.view(-1, 1)
            return made

    target, x = model("beside"), rows()
    wanted = target(x)
    for layer in target:
        layer.__class__ = Packing
    with attached(target, WAYS["layer"]):
        assert all(torch.equal(target(x), wanted) for _ in range(3))
    assert all(layer.weight.shape == (SIDE * SIDE, 1) for layer in target)
    assert torch.equal(target(x), wanted)


class Unknown(nn.Parameter):
    """A tensor of which nothing is known."""


class Alien(quantised.Inside):
    """A tensor that is put together as one of another class."""

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return quantised.Inside(inner["data8"], inner["scale"])


def test_what_cannot_be_streamed_is_refused_by_name_with_a_remedy() -> None:
    target = model("beside")
    target[1].weight.quant_state = None
    with pytest.raises(ConflictError, match=r"1 holds Beside weights that are yet to be quantised.*\.to\(\)"):
        layers_of({"model": target})
    target[1].weight = Tensor._make_subclass(Unknown, torch.zeros(2, 2))
    with pytest.raises(ConflictError, match=r"1 holds Unknown weights, which cannot be streamed.*offload=\"none\""):
        layers_of({"model": target})
    target[1].weight = nn.Parameter(Alien(*quantised._in_eight(torch.ones(2, 2))), requires_grad=False)
    with pytest.raises(ConflictError, match=r"1 holds Alien weights, which cannot be put together.*offload=\"none\""):
        layers_of({"model": target})


@pytest.mark.parametrize("form", quantised.FORMS)
def test_a_trace_counts_the_parts_and_what_widening_takes(form: str) -> None:
    target = model(form)
    figures = trace(target, rows())
    shared = quantised._CODE.nbytes if form == "beside" else 0
    scales = 4 * SIDE * len(target) if form == "rows" else 0  # of which a layer's first call reads
    assert abs(figures.weights_bytes - weight_bytes(target)) <= shared * 2 * len(target) + scales
    assert figures.activation_peak_bytes >= 4 * SIDE * SIDE
    assert not any(isinstance(tensor, FakeTensor) for tensor in held(target))


def test_fakes_have_fakes_for_all_parts() -> None:
    for form in quantised.FORMS:
        target = model(form)
        made = fakes_of([target], lambda tensor: torch.empty_like(tensor, device="meta"))
        assert {id(tensor) for tensor in held(target)} <= made.keys()


@pytest.mark.parametrize("form", ["inside", *(pytest.param(form, marks=pytest.mark.slow(20)) for form in RARE)])
def test_a_pipeline_is_planned_in_its_own_bytes(form: str) -> None:
    pipe = todays.flux()
    quantised.exchanged(pipe.transformer, quantised.FORMS[form])
    todays.check_budgets(pipe)
