"""Rules give shapes, strides and types of what operators make, as real kernels do."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sd_lowvram.memory import kernels_of
from sd_lowvram.tracing import layout_rules as rules
from sd_lowvram.tracing import trace, tracer

aten = torch.ops.aten

LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 8, 6, 4),
    "one picture": lambda: torch.randn(1, 8, 6, 4),
    "channels last": lambda: torch.randn(2, 8, 6, 4).to(memory_format=torch.channels_last),
    "one picture, channels last": lambda: torch.randn(1, 8, 6, 4).to(memory_format=torch.channels_last),
    "one picture, in doubt": lambda: (
        torch.randn(1, 6, 4, 8).permute(0, 3, 1, 2).as_strided((1, 8, 6, 4), (8, 1, 32, 8))
    ),
    "rows of a map": lambda: torch.randn(2, 8, 9, 4)[:, :, 2:8],
    "single pixels": lambda: torch.randn(2, 8, 1, 1),
    "transposed": lambda: torch.randn(2, 4, 6, 8).transpose(1, 3),
    "half": lambda: torch.randn(2, 8, 6, 4, dtype=torch.float16),
    "tokens": lambda: torch.randn(2, 24, 8),
    "tokens of a map": lambda: torch.randn(2, 8, 24).transpose(1, 2),
}
ELEMENTWISE = {
    "itself": lambda x: x + x,
    "number": lambda x: x * 0.5,
    "whole number": lambda x: x / 2,
    "no dimension": lambda x: x - torch.tensor(1.5),
    "a number a channel": lambda x: x * torch.randn(x.shape[1], *[1] * (x.dim() - 2), dtype=x.dtype),
    "a number a picture and channel": lambda x: torch.randn(*x.shape[:2], *[1] * (x.dim() - 2)) * x,
    "contiguous one": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "wider one": lambda x: torch.randn(x.shape) + x,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
}
NORMS = {
    "group norm": lambda x: torch.nn.functional.group_norm(x, 2, torch.ones(x.shape[1], dtype=x.dtype)),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "statistics of rows": lambda x: aten.native_layer_norm(x, x.shape[-2:], None, None, 1e-5),
}
CONVOLUTIONS = [
    torch.nn.Conv2d(8, 5, 3, padding=1),
    torch.nn.Conv2d(8, 6, 1),
    torch.nn.Conv2d(8, 6, 1, stride=2, padding="valid"),
    torch.nn.Conv2d(8, 6, 3, stride=2, dilation=2, padding=2, groups=2),
    torch.nn.Conv2d(8, 6, 3, padding=1).to(memory_format=torch.channels_last),
    torch.nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
]
OTHERS = {
    "view": lambda x: x.view(x.shape[0], 4, -1, *x.shape[2:]) if x.is_contiguous() else x.reshape(*x.shape[:2], -1),
    "transposed": lambda x: x.transpose(1, 2),
    "one": lambda x: x[:, 1],
    "parts": lambda x: x.chunk(2, 1),
    "copied": lambda x: x.clone(),
    "converted": lambda x: x.to(torch.bfloat16),
    "beside": lambda x: torch.cat([x, x], 1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum((0, 1)),
    "room": torch.empty_like,
    "new room": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    "room, channels last": lambda x: torch.empty(2, 3, 4, 5, device="cpu", memory_format=torch.channels_last),
    "filled": lambda x: torch.empty_like(x).copy_(x),
}  # fmt: skip
PRODUCTS = {
    "product": lambda x: x[0] @ torch.randn(8, 3),
    "products": lambda x: x @ torch.randn(2, 8, 3),
    "linear": lambda x: torch.nn.functional.linear(x, torch.randn(3, 8), torch.randn(3)),
}


def facts(result: Tensor | tuple[Tensor, ...], given: Tensor) -> list[tuple[object, ...]]:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    memory = given.untyped_storage()._cdata
    return [
        (one.shape, one.stride(), one.dtype, shared and one.storage_offset() - given.storage_offset())
        for one, shared in ((one, one.untyped_storage()._cdata == memory) for one in tensors)
    ]


def agree(run, given: Tensor) -> bool:
    """Whether a trace of ``run(given)`` gives what the real kernels do."""
    with torch.inference_mode(), kernels_of("cpu"):
        told = trace(lambda x: (x, run(x)), given).output
        return facts(told[1], told[0]) == facts(run(given), given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str, layout: str) -> None:
    assert agree(ELEMENTWISE[name], LAYOUTS[layout]())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, layout: str) -> None:
    assert agree(NORMS[name], LAYOUTS[layout]())


@pytest.mark.parametrize("layout", [name for name, make in LAYOUTS.items() if make().dim() == 4 and name != "half"])
@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_convolutions(conv: torch.nn.Module, layout: str) -> None:
    assert agree(conv, LAYOUTS[layout]())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, layout: str) -> None:
    assert agree(OTHERS[name], LAYOUTS[layout]())


@pytest.mark.parametrize("layout", ["contiguous", "one picture", "channels last", "half"])
def test_statistics_of_groups(layout: str) -> None:
    x = LAYOUTS[layout]()
    arguments = None, None, *x.shape[:2], x[0, 0].numel(), 2, 1e-5
    assert agree(lambda x: aten.native_group_norm(x, *arguments), x)


@pytest.mark.parametrize("layout", ["tokens", "tokens of a map"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, layout: str) -> None:
    assert agree(PRODUCTS[name], LAYOUTS[layout]())


REFUSED = {
    "inner": lambda x: x @ torch.empty(7, 3),
    "inner, of one": lambda x: x[0] @ torch.empty(7, 3),
    "batches": lambda x: torch.bmm(x, torch.empty(5, 8, 3)),
    "types": lambda x: torch.bmm(x, torch.empty(2, 8, 3, dtype=torch.float16)),
    "bias": lambda x: torch.nn.functional.linear(x, torch.empty(3, 8), torch.empty(4)),
    "shapes": lambda x: x + torch.empty(3, 5),
    "beside": lambda x: torch.cat([x, torch.empty(2, 7, 3)]),
    "channels": lambda x: torch.nn.functional.conv2d(x[None], torch.empty(3, 5, 1, 1)),
    "bias of a convolution": lambda x: torch.nn.functional.conv2d(x[None], torch.empty(3, 2, 1, 1), torch.empty(4)),
    "too small": lambda x: torch.nn.functional.conv2d(x[None], torch.empty(3, 2, 9, 9)),
    "rows": lambda x: torch.nn.functional.layer_norm(x, (7,)),
    "channels last": lambda x: torch.empty(2, 3, 4, device="cpu", memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_as_torch_does(name: str) -> None:
    given = torch.randn(2, 24, 8)
    with pytest.raises((RuntimeError, ValueError)), torch.inference_mode():
        REFUSED[name](given)
    with pytest.raises((RuntimeError, ValueError)), torch.inference_mode():
        trace(REFUSED[name], given)


def test_broadcast_operands_of_any_layout() -> None:
    chance = random.Random(0)
    for _ in range(500):
        shape = [chance.choice((2, 3, 4)) for _ in range(4)]
        operands = []
        for _ in range(2):
            sides = [chance.choice((1, side)) for side in shape]
            order = chance.sample(range(4), 4)
            operands.append(torch.empty([sides[dim] for dim in order]).permute(*map(order.index, range(4))))
        real = operands[0] + operands[1]
        told = trace(torch.add, *operands).output
        assert [step for step, side in zip(told.stride(), told.shape, strict=True) if side > 1] == [
            step for step, side in zip(real.stride(), real.shape, strict=True) if side > 1
        ]


def test_fakes_of_another_device_stay_there() -> None:
    with FakeTensorMode() as mode:
        given = torch.empty(2, 8, device="meta")
    given = FakeTensor(mode, given, torch.device("cuda"))
    told = trace(lambda x: torch.softmax(x * x, -1), given)
    assert told.output.device.type == "cuda" and told.output.shape == (2, 8)


def test_a_view_of_another_type_begins_where_it_should() -> None:
    given = torch.zeros(16, dtype=torch.float32)
    places = [8, 4, 8]  # a recipe is made at the first, and used at the others
    with torch.inference_mode():
        for dtype in (torch.int16, torch.complex64):
            views = [given[place : place + 4].view(dtype) for place in places]
            told = trace(lambda x, dtype=dtype: [x[place : place + 4].view(dtype) for place in places], given).output
            for fake, view in zip(told, views, strict=True):
                assert (fake.storage_offset(), fake.shape) == (view.storage_offset(), view.shape)


def test_the_fake_mode_is_not_asked_of_what_rules_tell(monkeypatch) -> None:
    answered: dict[str, bool] = {}
    tell = rules.recipe_of

    def noted(func, *rest):
        recipe = tell(func, *rest)
        answered[str(func)] = recipe is not None
        return recipe

    monkeypatch.setattr(tracer, "recipe_of", noted)
    monkeypatch.setattr(tracer, "_recipes", {True: {}, False: {}})
    block = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.SiLU())
    with torch.inference_mode():
        trace(lambda x, other: block(x + x).flatten(2) @ other, torch.randn(2, 8, 6, 6), torch.randn(16, 3))
    assert all(answered.values())
    assert {"aten.convolution.default", "aten.native_group_norm.default", "aten.silu.default", "aten.mm.default"} <= {
        *answered
    }
