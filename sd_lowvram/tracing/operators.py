"""Facts on operators for a trace: views, composite operators, and memory that kernels hold unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat.private import is_composite
from ..kernels.cpu_convolutions import is_unfolded, onednn_bytes, unfolded_bytes
from ..memory.accounts import traces_cpu
from .flop_counter import COPIES, FLOPS, IDLE, nbytes
from .memory_formats import wanted_format
from .op_cache import is_repeatable
from .quantised_products import MADE_OF

aten = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """Facts on an operator overload that a trace needs.

    Attributes:
        name: such as ``aten.addmm``.
        view: True if its results share the storage of an argument.
        composite: True if it consists of other operators, which allocate.
        hidden: function from arguments and result to the bytes that its kernel holds in addition and frees on return.
        flops: function from arguments and result to floating-point operations, if it is a product.
        moves: True if it reads or writes memory.
        convolves: True if it is a convolution.
        copies: True if it may copy bytes between device and host.
        repeatable: True if equal shapes, strides and types always give equal results.
        made_of: function of its arguments that does the same with torch's operators, for a quantiser's product.
    """

    name: str
    view: bool = False
    composite: bool = False
    hidden: Callable[[tuple[Any, ...], Any], int] | None = None
    flops: Callable[[Any, Any], int] | None = None
    moves: bool = False
    convolves: bool = False
    copies: bool = False
    repeatable: bool = False
    made_of: Callable[..., Any] | None = None


def describe(func: Any) -> Operator:
    """Look up the facts on an operator. This takes tens of microseconds, so callers cache the result."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim":
        return Operator(str(func))
    returns = [result.alias_info for result in schema.returns]
    declared = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    view = declared or schema.name in _UNDECLARED_VIEWS
    composite = is_composite(func)
    return Operator(
        name=str(func.overloadpacket),
        view=view,
        composite=composite,
        hidden=_HIDDEN.get(func),
        flops=FLOPS.get(func),
        moves=not view and func not in IDLE,
        convolves=func in (aten.convolution.default, aten.mkldnn_convolution.default),
        copies=func in COPIES,
        repeatable=is_repeatable(func),
        made_of=MADE_OF.get(schema.name),
    )


# They share the memory of their argument, and their schemas keep it from autograd.
_UNDECLARED_VIEWS = frozenset(f"aten::{name}" for name in ("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"))


def _copied_bytes(wanted: torch.memory_format, *tensors: Tensor) -> int:
    return sum(nbytes(tensor) for tensor in tensors if not tensor.is_contiguous(memory_format=wanted))


def _packed_copy(args: tuple[Any, ...], result: Any) -> int:
    """Bytes of a copy of the input, unless it is contiguous; on the CPU channels last needs no copy either."""
    return _copied_bytes(wanted_format(args[0]) if traces_cpu() else torch.contiguous_format, args[0])


def _copy_for_upsampling(args: tuple[Any, ...], result: Any) -> int:
    """Bytes of a copy of an input that has neither memory format."""
    return _copied_bytes(wanted_format(args[0]), args[0])


def _convolution_copies(args: tuple[Any, ...], result: Any) -> int:
    """Input and weight are brought to one memory format; oneDNN also reorders them, and the result back, on the CPU.

    cuDNN convolves half types with maps channels last: where neither map nor weight is, it holds both and the result in
    that order too (on an H100 1.00 to 1.04 of their bytes, `python -m benchmarks gpu --part workspaces`).
    """
    image, weight = args[0], args[1]
    wanted = wanted_format(image, weight)
    copies = _copied_bytes(wanted, image, weight)
    if not traces_cpu():
        plain = wanted is torch.contiguous_format and image.element_size() <= 2
        return copies + (nbytes(image) + nbytes(weight) + nbytes(result) if plain else 0)
    stride, transposed, groups = args[3], args[6], args[8]
    if not transposed and is_unfolded(image, weight.shape[2:], stride, groups):
        return copies + unfolded_bytes(image, weight.shape[2:], stride, result, groups)
    return copies + onednn_bytes(image, weight, result, groups, wanted is torch.channels_last)


def _onednn_copies(args: tuple[Any, ...], result: Any) -> int:
    image, weight, groups = args[0], args[1], args[6]
    return _copied_bytes(torch.contiguous_format, image, weight) + onednn_bytes(
        image, weight, result, groups, last=False
    )


_HIDDEN: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.convolution.default: _convolution_copies,
    aten.mkldnn_convolution.default: _onednn_copies,
    aten.native_group_norm.default: _packed_copy,
    aten.native_layer_norm.default: _packed_copy,
    aten._softmax.default: _packed_copy,
    aten.upsample_nearest2d.default: _copy_for_upsampling,
}
