"""What common operators make of their arguments, without the fake mode, which takes milliseconds over some.

A rule, where there is one; else torch's own kernels for meta tensors, where they are quick and right. What is wrong
about the arguments, the fake mode says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..memory.accounts import on_cpu
from ..memory.fake_mode import CPU
from .memory_formats import iterated_strides, strides_of, wanted_format
from .op_cache import Made, Recipe

aten = torch.ops.aten
_Results = tuple[Made, ...] | None


def recipe_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], view: bool) -> Recipe | None:
    """The results of ``func`` of fake tensors on the CPU; None where nothing but the fake mode knows them.

    Args:
        view: whether they share the memory of the first argument.
    """
    if not _is_on_cpu(args):
        return None
    rule = _RULES.get(func)
    if rule is None:
        return _by_meta(func, args, kwargs, view) if view or func in _BY_META else None
    made = rule(*args, **kwargs)
    return None if made is None else Recipe(made, None if len(made) == 1 else tuple)


def _is_on_cpu(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, FakeTensor):
            if arg.fake_device != CPU:
                return False
        elif isinstance(arg, (list, tuple)) and not _is_on_cpu(arg):
            return False
    return True


def _by_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], view: bool) -> Recipe | None:
    if kwargs.get("device") is not None or not isinstance(args[0], (Tensor, list, tuple)):
        return None
    with torch._C._DisableTorchDispatch():
        metas = tuple(map(_meta_of, args))
        try:
            result = func(*metas, **kwargs)
        except NotImplementedError:
            return None
    if result is metas[0]:
        return Recipe(None, None)
    results = (result,) if isinstance(result, Tensor) else result
    if view and any(one.element_size() != metas[0].element_size() for one in results):
        return None  # offsets are counted in other elements
    offsets = [int(one.storage_offset()) if view else None for one in results]
    made = (Made(one.shape, one.stride(), one.dtype, CPU, at) for one, at in zip(results, offsets, strict=True))
    return Recipe(tuple(made), None if isinstance(result, Tensor) else type(result))


def _meta_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(_meta_of, value)) if isinstance(value, (list, tuple)) else value


def _new(shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format | None = None) -> Made:
    return Made(tuple(shape), strides_of(shape, memory_format), dtype, CPU, None)


def _room(
    shape: Sequence[int], *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> _Results:
    plain = device is not None and torch.device(device).type == "cpu"
    plain &= memory_format in (None, torch.contiguous_format) or (
        memory_format is torch.channels_last and len(shape) == 4
    )
    return (_new(shape, dtype or torch.get_default_dtype(), memory_format),) if plain else None


def _room_like(like: Tensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> _Results:
    if memory_format not in (None, torch.preserve_format):
        return _room(like.shape, dtype=dtype or like.dtype, device=device or CPU, memory_format=memory_format)
    with torch._C._DisableTorchDispatch():
        stride = _meta_of(like).clone().stride()
    return (Made(like.shape, stride, dtype or like.dtype, CPU, None),) if device in (None, CPU) else None


def _elementwise(*args: Any, **_: Any) -> _Results:
    operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dim()]
    if not operands or not all(operand.is_floating_point() for operand in operands) or any(map(_is_complex, args)):
        return None
    dtype, shape = operands[0].dtype, operands[0].shape
    with torch._C._DisableTorchDispatch():
        for operand in operands[1:]:
            dtype = torch.promote_types(dtype, operand.dtype) if operand.dtype != dtype else dtype
            shape = torch.broadcast_shapes(shape, operand.shape) if operand.shape != shape else shape
    stride = iterated_strides(shape, operands, alone=len(operands) == len(args))
    return (Made(shape, stride, dtype, CPU, None),)


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())


def _of_one(first: Tensor, *_: Any, **__: Any) -> _Results:
    return _elementwise(first)


def _convolved(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    more: Sequence[int],
    groups: int,
) -> _Results:
    if image.dim() != 4 or image.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        return None
    sides = []
    for side, size, step, pad, spread, rest in zip(
        image.shape[2:], weight.shape[2:], stride, padding, dilation, more, strict=True
    ):
        reach = spread * (size - 1) - 2 * pad
        sides.append((side - 1) * step + reach + rest + 1 if transposed else (side - reach - 1) // step + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if min(sides) < 1 or image.dtype != weight.dtype or (bias is not None and bias.shape != (channels,)):
        return None
    return (_new((image.shape[0], channels, *sides), image.dtype, wanted_format(image, weight)),)


def _group_normed(
    image: Tensor, weight: Any, bias: Any, batch: int, _c: int, _p: int, groups: int, _e: float
) -> _Results:
    wanted = wanted_format(image) if on_cpu() else None
    return (_new(image.shape, image.dtype, wanted), *(_new((batch, groups), image.dtype),) * 2)


def _layer_normed(rows: Tensor, shape: Sequence[int], weight: Tensor | None, *_: Any) -> _Results:
    if list(rows.shape[-len(shape) :]) != list(shape) or (weight is not None and list(weight.shape) != list(shape)):
        return None
    outer = rows.shape[: rows.dim() - len(shape)]
    return (_new(rows.shape, rows.dtype), *(_new((*outer, *[1] * len(shape)), rows.dtype),) * 2)


def _product(one: Tensor, other: Tensor) -> _Results:
    fit = one.dim() == other.dim() > 1 and one.shape[:-2] == other.shape[:-2] and one.shape[-1] == other.shape[-2]
    return (_new((*one.shape[:-1], other.shape[-1]), one.dtype),) if fit and one.dtype == other.dtype else None


def _sum_of_product(added: Tensor, one: Tensor, other: Tensor, **_: Any) -> _Results:
    fits = added.dtype == one.dtype and added.shape in (other.shape[1:], (*one.shape[:1], *other.shape[1:]))
    return _product(one, other) if fits else None


_RULES: dict[Any, Callable[..., _Results]] = {
    aten.empty.memory_format: _room,
    aten.empty_like.default: _room_like,
    aten.convolution.default: _convolved,
    aten.native_group_norm.default: _group_normed,
    aten.native_layer_norm.default: _layer_normed,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten.addmm.default: _sum_of_product,
}
for _name in ("add", "sub", "mul", "div"):
    _RULES[getattr(aten, _name).Tensor] = _elementwise
for _name in ("silu", "gelu", "sigmoid", "exp", "sin", "cos", "rsqrt"):
    _RULES[getattr(aten, _name).default] = _of_one

_BY_META = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.cat.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.upsample_nearest2d.default,
        aten.new_empty.default,
        aten.embedding.default,
        aten.copy_.default,
    }
)
