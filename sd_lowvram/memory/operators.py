"""What a trace knows of an operator: does it allocate, is it made of others, what does its kernel hold unseen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .accounts import on_cpu

aten = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """One operator overload.

    Attributes:
        name: such as ``aten.addmm``.
        view: its results share the storage of an argument.
        composite: it is made of other operators, which allocate.
        hidden: from arguments and result to the bytes that its kernel holds besides them and frees on return.
        lay_out: from arguments and result to the result as the real kernel lays it out, where fakes are wrong.
    """

    name: str
    view: bool = False
    composite: bool = False
    hidden: Callable[[tuple[Any, ...], Any], int] | None = None
    lay_out: Callable[[tuple[Any, ...], Any], Any] | None = None


def describe(func: Any) -> Operator:
    """Look an operator up; costs tens of microseconds, so keep the answer."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim":
        return Operator(str(func))
    returns = [result.alias_info for result in schema.returns]
    view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    lay_out = functools.partial(_as_iterated, func) if func in _ELEMENTWISE else _LAYOUTS.get(func)
    return Operator(str(func.overloadpacket), view, composite, _HIDDEN.get(func), lay_out)


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _wanted_format(*tensors: Tensor) -> torch.memory_format:
    """Channels last as soon as one of them is: what convolutions bring their arguments and result to."""
    return torch.channels_last if any(map(_is_channels_last, tensors)) else torch.contiguous_format


def _is_channels_last(tensor: Tensor) -> bool:
    """As torch decides it: the strides of dimensions of size 1 count, and a doubtful case is not channels last."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        stride, size = tensor.stride(dim), tensor.shape[dim]
        if stride == 0 or stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(size, 1)
    return True


def _copied(wanted: torch.memory_format, *tensors: Tensor) -> int:
    return sum(nbytes(tensor) for tensor in tensors if not tensor.is_contiguous(memory_format=wanted))


def _packed_copy(args: tuple[Any, ...], result: Any) -> int:
    """Of the input, unless it is contiguous; on the CPU channels last will do too."""
    return _copied(_wanted_format(args[0]) if on_cpu() else torch.contiguous_format, args[0])


def _convolution_copies(args: tuple[Any, ...], result: Any) -> int:
    """Input and weight are brought to one memory format; oneDNN also reorders them, and the result back, on the CPU."""
    image, weight = args[0], args[1]
    wanted = _wanted_format(image, weight)
    copies = _copied(wanted, image, weight)
    if not on_cpu():
        return copies
    if wanted is torch.channels_last:
        return copies + nbytes(weight)
    half = image.dtype in (torch.float16, torch.bfloat16)
    return copies + max(nbytes(image) + nbytes(weight), nbytes(result) * (2 if half else 1))


def _formatted(result: Tensor, wanted: torch.memory_format) -> Tensor:
    if result.dim() != 4 or result.is_contiguous(memory_format=wanted):
        return result
    return torch.empty_like(result, memory_format=wanted)


def _convolved(args: tuple[Any, ...], result: Any) -> Any:
    return _formatted(result, _wanted_format(args[0], args[1]))


def _normalised(args: tuple[Any, ...], result: Any) -> Any:
    wanted = _wanted_format(args[0]) if on_cpu() else torch.contiguous_format
    return _formatted(result[0], wanted), *result[1:]


def _as_iterated(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """The strides of a single picture's sum, which fakes take for channels last where the real iterator does not."""
    if result.dim() != 4 or result.shape[0] != 1 or result.is_contiguous():
        return result
    with _disable_current_modes():
        metas = [
            torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        ]
        strides = func(*metas).stride()
    return result if strides == result.stride() else result.new_empty_strided(result.shape, strides)


_HIDDEN: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.convolution.default: _convolution_copies,
    aten.native_group_norm.default: _packed_copy,
    aten.native_layer_norm.default: _packed_copy,
    aten._softmax.default: _packed_copy,
    aten.upsample_nearest2d.default: _packed_copy,
}

_LAYOUTS: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    aten.convolution.default: _convolved,
    aten.native_group_norm.default: _normalised,
}
_ELEMENTWISE = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
