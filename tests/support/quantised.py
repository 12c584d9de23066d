"""Weights as quantisers keep them: by the libraries themselves, and by small classes of the same forms for where none
is installed."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

_CODE = torch.linspace(-1, 1, 256)
"""One table for all weights of the process, as bitsandbytes has one."""


class Inside(Tensor):
    """A weight in 8 bits with a scale for each row, which has no memory of its own, as quanto's and torchao's."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Any) -> Inside:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data: Tensor, scale: Any) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Inside:
        return cls(inner["data8"], inner["scale"])

    def wide(self) -> Tensor:
        scale = self.scale.wide() if isinstance(self.scale, Inside) else self.scale
        return self.data8.float() * scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            own = args[0]
            return cls(own.data8.detach(), own.scale.detach())
        return func(*(arg.wide() if isinstance(arg, Inside) else arg for arg in args), **(kwargs or {}))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *bias = args
            return functional.linear(x, weight.wide(), *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Beside(nn.Parameter):
    """Bytes with a ``quant_state`` that has another one in it, as bitsandbytes' of 4 bits."""


class Rows(nn.Parameter):
    """Bytes in 8 bits with scales of rows, which the first call moves to the layer, as bitsandbytes' of 8 bits."""

    CB: Any
    SCB: Any


class BesideLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.weight.quant_state
        scale = state.state2.code[state.absmax.long()] + state.offset
        return functional.linear(x, state.code[self.weight.long()] * scale[:, None], self.bias)


class RowsLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.CB is not None:
            self.state.CB, self.state.SCB = weight.CB, weight.SCB
            weight.CB = weight.SCB = None
        made = functional.linear(x, self.state.CB.float() * self.state.SCB[:, None], self.bias)
        weight.data = self.state.CB
        return made


def _in_eight(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


def inside(layer: nn.Linear) -> nn.Module:
    data, scale = _in_eight(layer.weight)
    layer.weight = nn.Parameter(Inside(data, scale), requires_grad=False)
    return layer


def twice_inside(layer: nn.Linear) -> nn.Module:
    data, scale = _in_eight(layer.weight)
    layer.weight = nn.Parameter(Inside(data, Inside(*_in_eight(scale))), requires_grad=False)
    return layer


def beside(layer: nn.Linear) -> nn.Module:
    made = BesideLinear(layer.in_features, layer.out_features, layer.bias is not None)
    largest = layer.weight.detach().abs().amax()
    places = ((layer.weight.detach() / largest + 1) * 127.5).round().to(torch.uint8)
    weight = Tensor._make_subclass(Beside, places)
    absmax = (torch.arange(layer.out_features) % 256).to(torch.uint8)
    inner = types.SimpleNamespace(absmax=torch.rand(4), code=_CODE, offset=None)
    weight.quant_state = types.SimpleNamespace(absmax=absmax, code=_CODE, offset=largest, state2=inner, blocksize=64)
    made.weight, made.bias = weight, layer.bias
    return made


def rows(layer: nn.Linear) -> nn.Module:
    made = RowsLinear(layer.in_features, layer.out_features, layer.bias is not None)
    data, scale = _in_eight(layer.weight)
    weight = Tensor._make_subclass(Rows, data)
    weight.CB, weight.SCB = weight.data, scale.flatten()
    made.weight, made.bias = weight, layer.bias
    made.state = types.SimpleNamespace(CB=None, SCB=None)
    return made


FORMS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "inside": inside, "twice inside": twice_inside, "beside": beside, "rows": rows,
}  # fmt: skip


def exchanged(model: nn.Module, form: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The model with its linear layers in another form."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, form(module))
    return model.eval().requires_grad_(False)


def nf4(model: nn.Module, nested: bool = True) -> nn.Module:
    """By bitsandbytes, layers of which its kernels for processors take the shape."""
    made = importlib.import_module("bitsandbytes").nn

    def form(layer: nn.Linear) -> nn.Module:
        if layer.in_features % 64 or layer.out_features % 32:
            return layer
        kinds = {"quant_type": "nf4", "compress_statistics": nested}
        four = made.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, **kinds)
        four.weight, four.bias = made.Params4bit(layer.weight.data, module=four, **kinds), layer.bias
        return four.to("cpu")

    return exchanged(model, form)


def int8(model: nn.Module, threshold: float = 6.0) -> nn.Module:
    """By bitsandbytes."""
    made = importlib.import_module("bitsandbytes").nn

    def form(layer: nn.Linear) -> nn.Module:
        sizes = layer.in_features, layer.out_features, layer.bias is not None
        eight = made.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=threshold)
        eight.weight, eight.bias = made.Int8Params(layer.weight.data, requires_grad=False), layer.bias
        return eight.to("cpu")

    return exchanged(model, form)


def quanto(model: nn.Module, kind: str = "qint8") -> nn.Module:
    library = importlib.import_module("optimum.quanto")
    library.quantize(model, weights=getattr(library, kind))
    library.freeze(model)
    return model.requires_grad_(False)


def torchao(model: nn.Module, kind: str = "Int8WeightOnlyConfig") -> nn.Module:
    library = importlib.import_module("torchao.quantization")
    library.quantize_(model, getattr(library, kind)())
    return model.requires_grad_(False)


LIBRARIES: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "nf4": ("bitsandbytes", nf4),
    "nf4, not nested": ("bitsandbytes", lambda model: nf4(model, nested=False)),
    "int8": ("bitsandbytes", int8),
    "int8, no outliers": ("bitsandbytes", lambda model: int8(model, 0.0)),
    "quanto int8": ("optimum.quanto", quanto),
    "quanto int4": ("optimum.quanto", lambda model: quanto(model, "qint4")),
    "quanto fp8": ("optimum.quanto", lambda model: quanto(model, "qfloat8")),
    "torchao int8": ("torchao", torchao),
    "torchao int8, inputs too": ("torchao", lambda model: torchao(model, "Int8DynamicActivationInt8WeightConfig")),
    "torchao fp8": ("torchao", lambda model: torchao(model, "Float8WeightOnlyConfig")),
}
"""By name: the library, and a function that quantises a model by it."""


def quantised_by(name: str, model: nn.Module) -> nn.Module:
    """The model, quantised by a library; the test is skipped where that is not installed."""
    library, quantise = LIBRARIES[name]
    try:
        found = importlib.util.find_spec(library)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{library} is not installed: pip install {library.replace('.', '-')}")
    return quantise(model)
