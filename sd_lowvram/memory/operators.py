"""What a trace knows of an operator: does it allocate, is it made of others, what does its kernel hold unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Hidden(NamedTuple):
    """Bytes that a kernel holds besides its arguments and results, on a GPU and on the CPU; freed when it returns."""

    gpu: int = 0
    cpu: int = 0


@dataclass(frozen=True)
class Operator:
    """One operator overload.

    Attributes:
        name: such as ``aten.addmm``.
        view: its results share the storage of an argument.
        composite: it is made of other operators, which allocate.
        hidden: from arguments and result to what its kernel holds unseen, if anything.
    """

    name: str
    view: bool = False
    composite: bool = False
    hidden: Callable[[tuple[Any, ...], Any], Hidden] | None = None


def describe(func: Any) -> Operator:
    """Look an operator up; costs tens of microseconds, so keep the answer."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "prim":
        return Operator(str(func))
    returns = [result.alias_info for result in schema.returns]
    view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Operator(str(func.overloadpacket), view, composite, _HIDDEN.get(func))


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _packed_copy(tensor: Tensor) -> int:
    """Bytes of the copy that a kernel makes of a tensor that is neither contiguous nor channels last."""
    if tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)):
        return 0
    return nbytes(tensor)


def _of_packed_input(args: tuple[Any, ...], result: Any) -> Hidden:
    copied = _packed_copy(args[0])
    return Hidden(copied, copied)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _of_convolution(args: tuple[Any, ...], result: Any) -> Hidden:
    """Input and weight are brought to one memory format; oneDNN also reorders them, and the result back, on the CPU."""
    image, weight = args[0], args[1]
    channels_last = _is_channels_last(image) or _is_channels_last(weight)
    wanted = torch.channels_last if channels_last and image.dim() == 4 else torch.contiguous_format
    copies = sum(nbytes(tensor) for tensor in (image, weight) if not tensor.is_contiguous(memory_format=wanted))
    if channels_last:
        return Hidden(copies, copies + nbytes(weight))
    half = image.dtype in (torch.float16, torch.bfloat16)
    return Hidden(copies, copies + max(nbytes(image) + nbytes(weight), nbytes(result) * (2 if half else 1)))


_HIDDEN: dict[Any, Callable[[tuple[Any, ...], Any], Hidden]] = {
    aten.convolution.default: _of_convolution,
    aten.native_group_norm.default: _of_packed_input,
    aten.native_layer_norm.default: _of_packed_input,
    aten._softmax.default: _of_packed_input,
    aten.upsample_nearest2d.default: _of_packed_input,
}
