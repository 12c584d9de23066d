"""Work of a traced run: operations, bytes through the device's memory, bytes between the accounts."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import LowVRAMError
from ..memory.repeats import times
from ..streaming.timing import ModuleSpan

aten = torch.ops.aten


class TooManyCopiesError(LowVRAMError):
    """Raised by a trace that copies more bytes than its limit."""


class ModuleWork:
    """Work of a run, module by module in order.

    Attributes:
        spans: the work of a module until another module's begins, in order.
    """

    def __init__(self, most_copied: float = math.inf) -> None:
        """
        Args:
            most_copied: bytes between the accounts, beyond which :meth:`count_copy` raises.
        """
        self.spans: list[ModuleSpan] = []
        self._copies_left = most_copied

    def count(
        self,
        path: str,
        flops: int,
        moved_bytes: int,
        packed_bytes: int = 0,
        held_bytes: int = 0,
        besides: int = 0,
        wide: bool = False,
        group_elements: int = 0,
    ) -> None:
        """Add an operator in the module ``path``; in a loop, as often as the current pass represents equal passes.

        Args:
            path: dotted name of the module.
            flops: floating-point operations.
            moved_bytes: bytes that the operator reads and writes.
            packed_bytes: bytes of its weights that a CPU reorders.
            held_bytes: bytes on the device while it runs.
            besides: bytes that its library moves in kernels before and after it.
            wide: True if its operations are those of wide products.
            group_elements: elements in one group of a GroupNorm.
        """
        span, passes = self._span(path), times()
        span.operators += passes
        span.flops += flops * passes
        span.wide_flops += flops * passes if wide else 0
        span.moved_bytes += (moved_bytes + besides) * passes
        span.product_bytes += moved_bytes * passes if flops else 0
        span.packed_bytes += packed_bytes * passes
        span.group_elements += group_elements * passes
        span.held_bytes = max(span.held_bytes, held_bytes)

    def count_copy(self, path: str, copied_bytes: int) -> None:
        """Add bytes that are copied between device and host in the module ``path``.

        Args:
            path: dotted name of the module.
            copied_bytes: bytes of the copy.

        Raises:
            TooManyCopiesError: the limit of the trace is exceeded.
        """
        self._span(path).copied_bytes += copied_bytes * times()
        self._check_copies(copied_bytes * times())

    def add(self, span: ModuleSpan) -> None:
        """Add the work of a module, recorded before.

        Raises:
            TooManyCopiesError: the limit of the trace is exceeded.
        """
        self.spans.append(span)
        self._check_copies(span.copied_bytes)

    def _check_copies(self, copied_bytes: int) -> None:
        self._copies_left -= copied_bytes
        if self._copies_left < 0:
            raise TooManyCopiesError("more is copied than was asked about")

    def _span(self, path: str) -> ModuleSpan:
        if not self.spans or self.spans[-1].path != path:
            self.spans.append(ModuleSpan(path))
        return self.spans[-1]

    def totals(self) -> dict[str, int]:
        """The sums over all spans, by the names of their attributes."""
        _, *names, _ = (field.name for field in dataclasses.fields(ModuleSpan))
        columns = zip(*map(operator.attrgetter(*names), self.spans), strict=True)
        return dict.fromkeys(names, 0) | dict(zip(names, map(sum, columns), strict=False))


def argument_bytes(args: Any, result: Any) -> int:
    """Bytes of all tensors among arguments and results."""
    total = 0
    for value in (*args, result):
        if isinstance(value, Tensor):
            total += nbytes(value)
        elif isinstance(value, (list, tuple)):
            total += argument_bytes(value, None)
    return total


def attention_flops(args: Any, result: Any) -> int:
    """Operations of attention: two products of (batch, heads, queries, keys) with the widths of keys and values."""
    query: Tensor
    query, key, value = args[:3]
    flops: int = 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return flops


def _product_flops(args: Any, result: Tensor) -> int:
    return 2 * result.numel() * int(args[-1].shape[-2])


def _sum_of_product_flops(args: Any, result: Tensor) -> int:
    return 2 * result.numel() * int(args[2].shape[-2])


def group_elements(func: Any, args: Any) -> int:
    """Elements in one group of torch's GroupNorm; 0 for other operators."""
    if func is not aten.native_group_norm.default:
        return 0
    return int(args[0].numel()) // max(1, int(args[3]) * int(args[6]))


def is_wide(func: Any, args: Any) -> bool:
    """True if an operator is a matrix product, or attention, as wide as in today's transformers."""
    if func in _ATTENTION:
        return is_wide_attention(args)
    return func in _WIDE and min(args[_WIDE[func]].shape) >= _WIDE_MATRIX


def is_wide_attention(args: Any) -> bool:
    """True if attention has heads of the width that its kernels are optimised for, as in today's transformers."""
    return bool(args[0].shape[-1] == 128)


def _convolution_flops(args: Any, result: Tensor) -> int:
    weight, transposed = args[1], args[6] is True  # oneDNN's operator has its groups, a number, at this place
    counted: Tensor = args[0] if transposed else result
    flops: int = 2 * counted.numel() * math.prod(weight.shape[1:])
    return flops


FLOPS: dict[Any, Callable[[Any, Any], int]] = {
    aten.mm.default: _product_flops,
    aten.bmm.default: _product_flops,
    aten.bmm.out: _product_flops,
    aten.addmm.default: _sum_of_product_flops,
    aten.baddbmm.default: _sum_of_product_flops,
    aten.baddbmm_.default: _sum_of_product_flops,
    aten.convolution.default: _convolution_flops,
    aten.mkldnn_convolution.default: _convolution_flops,
}
_WIDE_MATRIX = 2048
"""Smallest side of a wide matrix. In Stable Diffusion's UNets one side is at most 1280; FLUX has larger ones."""
_WIDE = {aten.mm.default: 1, aten.addmm.default: 2}
"""The place of the matrix among arguments."""
_ATTENTION: set[Any] = set()
for _name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
    _packet = getattr(aten, f"_scaled_dot_product_{_name}", None)
    if _packet is not None:
        FLOPS[_packet.default] = attention_flops
        _ATTENTION.add(_packet.default)

_packet = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
if _packet is not None:

    def _packed_convolution_flops(args: Any, result: Tensor) -> int:
        return 2 * result.numel() * int(args[1][0].numel())

    FLOPS[_packet.default] = _packed_convolution_flops

_WEIGHT = {aten.convolution.default: 1, aten.mkldnn_convolution.default: 1, aten.addmm.default: 2, aten.mm.default: 1}


def packed_weight_bytes(func: Any, args: Any) -> int:
    """Bytes of the weight among the arguments of ``func``, if it is an operator that has one."""
    place = _WEIGHT.get(func)
    return 0 if place is None else nbytes(args[place])


def library_bytes(func: Any, args: Any, result: Any, hidden: int) -> int:
    """Return the bytes that a GPU's library moves for an operator in addition to its arguments and result.

    A copy in another order is written and read. torch adds a convolution's bias by a separate kernel. For GroupNorm it
    reads a map once for the statistics and once more to normalise.

    Args:
        func: the operator.
        args, result: its fake tensors.
        hidden: bytes of its hidden copies.
    """
    if func is aten.native_group_norm.default:
        return 2 * hidden + nbytes(args[0])
    if func is not aten.convolution.default:
        return 0
    return 2 * hidden + (0 if args[2] is None else 2 * nbytes(result))


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


# These only reserve memory.
IDLE = frozenset(
    {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
)
COPIES = frozenset({aten.copy_.default, aten._to_copy.default, aten.clone.default})
