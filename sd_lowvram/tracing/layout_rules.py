"""Results of common operators computed without the fake mode, which needs milliseconds for some.

An operator has a rule of ours, or torch's own meta kernel is called where that is fast and right. Errors in the
arguments are left to the fake mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.private import FakeTensor, disable_fakes, elementwise_strides
from ..memory.accounts import traces_cpu
from ..memory.fake_mode import CPU
from .memory_formats import wanted_format
from .op_cache import Made, Recipe

aten = torch.ops.aten
_Results = tuple[Made, ...] | None


def recipe_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], view: bool) -> Recipe | None:
    """Return the recipe of an operator's results; None if only the fake mode knows them.

    Args:
        func: the operator.
        args, kwargs: its arguments, fake tensors on the CPU.
        view: True if the results share the memory of the first argument.
    """
    if not _is_on_cpu(args):
        return None
    rule = _RULES.get(func)
    if rule is None:
        return _run_on_meta(func, args, kwargs, view) if view or func in _BY_META else None
    results = rule(*args, **kwargs)
    return None if results is None else Recipe(results or None, tuple if len(results) > 1 else None)


def _is_on_cpu(args: Sequence[Any]) -> bool:
    for arg in args:
        if isinstance(arg, FakeTensor):
            if arg.fake_device != CPU:
                return False
        elif isinstance(arg, (list, tuple)) and not _is_on_cpu(arg):
            return False
    return True


def _run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], view: bool) -> Recipe | None:
    if not isinstance(args[0], (Tensor, list, tuple)):
        return None
    if kwargs.get("device") is not None:
        if torch.device(kwargs["device"]) != CPU:
            return None
        kwargs = kwargs | {"device": "meta"}
    with disable_fakes():
        metas = tuple(map(_meta_of, args))
        try:
            result = _KERNELS.get(func, func)(*metas, **kwargs)
        except NotImplementedError:
            return None
    if result is metas[0]:
        return Recipe(None, None)
    results = (result,) if isinstance(result, Tensor) else result
    offsets = [int(output.storage_offset()) if view else None for output in results]
    layouts = (
        Made(output.shape, output.stride(), output.dtype, CPU, at) for output, at in zip(results, offsets, strict=True)
    )
    return Recipe(tuple(layouts), None if isinstance(result, Tensor) else type(result))


def _meta_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(_meta_of, value)) if isinstance(value, (list, tuple)) else value


def _new(shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format | None = None) -> Made:
    with disable_fakes():
        meta = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format)
    return Made(meta.shape, meta.stride(), dtype, CPU, None)


def _convolution_result(
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
    if image.dim() not in (4, 5) or image.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        return None
    sides = []
    numbers = (_of_sides(image, own) for own in (stride, padding, dilation, more))
    for side, size, step, pad, spread, rest in zip(image.shape[2:], weight.shape[2:], *numbers, strict=True):
        reach = spread * (size - 1) - 2 * pad
        sides.append((side - 1) * step + reach + rest + 1 if transposed else (side - reach - 1) // step + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    if min(sides) < 1 or image.dtype != weight.dtype or (bias is not None and bias.shape != (channels,)):
        return None
    return (_new((image.shape[0], channels, *sides), image.dtype, wanted_format(image, weight)),)


def _of_sides(image: Tensor, numbers: Sequence[int]) -> Sequence[int]:
    """A number for each side of a map; torch takes one for all."""
    return numbers if len(numbers) > 1 else [*numbers] * (image.dim() - 2)


def _onednn_result(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> _Results:
    return _convolution_result(image, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)


def _group_norm_result(
    image: Tensor, weight: Any, bias: Any, batch: int, _c: int, _p: int, groups: int, _e: float
) -> _Results:
    wanted = wanted_format(image) if traces_cpu() else None
    return (_new(image.shape, image.dtype, wanted), *(_new((batch, groups), image.dtype),) * 2)


def _layer_norm_result(rows: Tensor, shape: Sequence[int], weight: Tensor | None, *_: Any) -> _Results:
    if list(rows.shape[-len(shape) :]) != list(shape) or (weight is not None and list(weight.shape) != list(shape)):
        return None
    outer = rows.shape[: rows.dim() - len(shape)]
    return (_new(rows.shape, rows.dtype), *(_new((*outer, *[1] * len(shape)), rows.dtype),) * 2)


def _elementwise(first: Any, other: Any, **_: Any) -> _Results:
    with disable_fakes():
        first, other = _meta_of(first), _meta_of(other)
        dtype = torch.result_type(first, other)
        if not dtype.is_floating_point:
            return None
        number = torch.empty((), device="meta")  # the kernels take a Python number as a tensor without dimensions
        alike = torch.broadcast_tensors(*(each if isinstance(each, Tensor) else number for each in (first, other)))
        return (Made(alike[0].shape, elementwise_strides(*alike), dtype, CPU, None),)


def _first_strides(first: Tensor, *_: Any, **__: Any) -> _Results:
    # With one tensor, elementwise_strides would return its strides, and the kernels do not.
    return _elementwise(first, first)


def _first_argument(first: Tensor, other: Any = None, **_: Any) -> _Results:
    """No new result: the first argument itself."""
    if not isinstance(other, Tensor):
        return ()
    return (
        () if other.dtype == first.dtype and torch.broadcast_shapes(first.shape, other.shape) == first.shape else None
    )


_RULES: dict[Any, Callable[..., _Results]] = {
    aten.convolution.default: _convolution_result,
    aten.mkldnn_convolution.default: _onednn_result,
    aten.native_group_norm.default: _group_norm_result,
    aten.native_layer_norm.default: _layer_norm_result,
    **{getattr(aten, name).Tensor: _elementwise for name in ("add", "sub", "mul", "div")},
    **{getattr(aten, name).Tensor: _first_argument for name in ("add_", "sub_")},
    aten.pow_.Scalar: _first_argument,
    aten.silu_.default: _first_argument,
    **{
        getattr(aten, name).default: _first_strides
        for name in ("silu", "gelu", "sigmoid", "exp", "sin", "cos", "rsqrt")
    },
}

_BY_META = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.copy_.default,
        aten.cat.default,
        aten.mean.dim,
        aten.sum.dim_IntList,
        aten.upsample_nearest2d.default,
        aten.embedding.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
    }
)

_KERNELS = {aten.empty_like.default: aten._to_copy.default}
"""Operators to call instead: the same result, with the right strides for dimensions of size 1."""
