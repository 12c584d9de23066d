"""What a trace knows of an operator: does it allocate, is it made of others, what does its kernel hold unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .accounts import on_cpu
from .recipes import is_repeatable
from .work import COPIES, FLOPS, IDLE

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
        flops: from arguments and result to floating-point operations, if it is a product.
        moves: it reads or writes memory.
        copies: it may carry bytes from one account to the other.
        repeatable: the same shapes, strides and types give the same again.
    """

    name: str
    view: bool = False
    composite: bool = False
    hidden: Callable[[tuple[Any, ...], Any], int] | None = None
    lay_out: Callable[[tuple[Any, ...], Any], Any] | None = None
    flops: Callable[[Any, Any], int] | None = None
    moves: bool = False
    copies: bool = False
    repeatable: bool = False


def describe(func: Any) -> Operator:
    """Look an operator up; costs tens of microseconds, so keep the answer."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim":
        return Operator(str(func))
    returns = [result.alias_info for result in schema.returns]
    told = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    view = told or schema.name in _UNTOLD_VIEWS
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Operator(
        name=str(func.overloadpacket),
        view=view,
        composite=composite,
        hidden=_HIDDEN.get(func),
        lay_out=_LAYOUTS.get(func),
        flops=FLOPS.get(func),
        moves=not view and func not in IDLE,
        copies=func in COPIES,
        repeatable=is_repeatable(func),
    )


# They share the memory of their argument, and their schemas keep it from autograd.
_UNTOLD_VIEWS = frozenset(f"aten::{name}" for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"))


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


def _is_doubtful(result: Tensor) -> bool:
    """Of one picture, the strides may say channels last or not; fakes and real tensors then differ."""
    return result.dim() == 4 and result.shape[0] == 1 and not result.is_contiguous()


def _viewed(args: tuple[Any, ...], result: Any) -> Any:
    if not _is_doubtful(result):
        return result
    with _disable_current_modes():
        meta = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
        strides = meta.view(result.shape).stride()
    return result.as_strided(result.shape, strides)


def _iterated(args: tuple[Any, ...], result: Any) -> Any:
    """An elementwise result with the strides that torch's iterator gives it from operands unlike each other."""
    if not _is_doubtful(result):
        return result
    operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dim()]
    alike = len(operands) == len(args) and all(operand.shape == result.shape for operand in operands)
    if alike and all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands):
        return result
    strides, step = [0] * 4, 1
    for dim in _iteration_order(result.shape, [operand.expand(result.shape).stride() for operand in operands]):
        strides[dim] = step
        step *= result.shape[dim]
    return result.new_empty_strided(result.shape, strides)


def _iteration_order(shape: torch.Size, operands: list[tuple[int, ...]]) -> list[int]:
    """Dimensions from the innermost outwards, sorted by the strides of the operands, the first one first."""
    order: list[int] = []
    for dim in reversed(range(len(shape))):
        place = len(order)
        for at in reversed(range(len(order))):
            verdict = _lies_outside(order[at], dim, shape, operands)
            if verdict is False:
                break
            if verdict:
                place = at
        order.insert(place, dim)
    return order


def _lies_outside(first: int, second: int, shape: torch.Size, operands: list[tuple[int, ...]]) -> bool | None:
    """Whether dimension ``first`` belongs outside of ``second``; None: the operands do not say."""
    for strides in operands:
        if strides[first] and strides[second]:
            if strides[first] != strides[second]:
                return strides[first] > strides[second]
            if shape[first] > shape[second]:
                return True
    return None


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
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.add.Tensor: _iterated,
    aten.sub.Tensor: _iterated,
    aten.mul.Tensor: _iterated,
    aten.div.Tensor: _iterated,
}
