"""Weights for a call under autograd: the layer computes with copies, and autograd stores how to repeat each copy.

A lent weight (``tensor.data``) cannot be saved for the backward, because by then its bytes belong to another layer.
Here every copy is made from the weight by differentiable operations. Gradients therefore reach the weight itself, on
its device and in its type, and the backward repeats the copies layer by layer. Fidelity: ``bitwise``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import storage_key
from ..errors import LowVRAMError
from ..weights import Convert
from .layers import version

Make = Callable[[], Tensor]

_MADE_BY = "_sd_lowvram_made_by"
"""Attribute of a copy: the function that makes the copy again from its weight."""


@contextlib.contextmanager
def exchange_weights(module: nn.Module, tensors: Iterable[Tensor], convert: Convert) -> Iterator[None]:
    """Replace ``tensors`` of ``module`` and its submodules by ``convert`` of them within the block, for one call.

    Args:
        module: the module that is called.
        tensors: its weights to replace.
        convert: returns new memory, by differentiable operations if the tensor requires gradients.
    """
    copies = {id(tensor): _converted_copy(tensor, convert) for tensor in tensors}
    by_storage = {storage_key(copy): copy for copy in copies.values()}
    before: list[tuple[dict[str, Any], str, Tensor]] = []

    def pack(saved: Tensor) -> Make:
        copy = by_storage.get(storage_key(saved))
        return _view_maker(copy, saved) if copy is not None and copy.dtype == saved.dtype else _checked_getter(saved)

    try:
        for inner in module.modules():
            tables: list[dict[str, Any]] = [inner._parameters, inner._buffers]
            for held in tables:
                for name, tensor in held.items():
                    if id(tensor) in copies:
                        before.append((held, name, tensor))
                        held[name] = copies[id(tensor)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda make: make()):
            yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def _converted_copy(tensor: Tensor, convert: Convert) -> Tensor:
    source: Make = vars(tensor).get(_MADE_BY) or _checked_getter(tensor)
    copy = convert(tensor)
    vars(copy)[_MADE_BY] = lambda: convert(source())
    return copy


def _view_maker(copy: Tensor, saved: Tensor) -> Make:
    """Return a function that makes ``saved``, a view of ``copy``, again; neither of them is stored."""
    make, view = vars(copy)[_MADE_BY], (saved.shape, saved.stride(), saved.storage_offset())

    def unpack() -> Tensor:
        with torch.no_grad():
            base: Tensor = make()
        return base.as_strided(*view)

    return unpack


def _checked_getter(tensor: Tensor) -> Make:
    """Return a function that returns ``tensor``, after checking that nothing was written to it since."""
    same, before = tensor.detach(), version(tensor)

    def unpack() -> Tensor:
        if version(same) != before:
            raise LowVRAMError(
                f"a tensor {tuple(same.shape)} that a backward needs was written to after the call: call backward() "
                "before weights or inputs change"
            )
        return same

    return unpack
