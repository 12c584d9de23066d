"""Weights for a call that autograd follows: copies of a layer's own are its weights for the call, and autograd keeps
how to make each, not the copy.

A weight that is lent (``tensor.data``) cannot be kept for a backward: by then its bytes are another layer's. Here every
copy is made from the weight by operations that autograd knows. So gradients come back to the weight itself, on its
device and in its type, and a backward makes the copies anew, layer after layer. Fidelity: ``bitwise``.
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
"""On a copy: how to make it anew from the weight that it is of."""


@contextlib.contextmanager
def exchanged(module: nn.Module, tensors: Iterable[Tensor], convert: Convert) -> Iterator[None]:
    """Within the block, one call of ``module``, those of its tensors and of the modules below it that are among
    ``tensors`` are ``convert`` of them.

    Args:
        convert: gives new memory, by operations that autograd follows where the tensor requires gradients.
    """
    copies = {id(tensor): _copied(tensor, convert) for tensor in tensors}
    kept = {storage_key(copy): copy for copy in copies.values()}
    before: list[tuple[dict[str, Any], str, Tensor]] = []

    def pack(saved: Tensor) -> Make:
        copy = kept.get(storage_key(saved))
        return _made_anew(copy, saved) if copy is not None and copy.dtype == saved.dtype else _unchanged(saved)

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


def _copied(tensor: Tensor, convert: Convert) -> Tensor:
    source: Make = vars(tensor).get(_MADE_BY) or _unchanged(tensor)
    copy = convert(tensor)
    vars(copy)[_MADE_BY] = lambda: convert(source())
    return copy


def _made_anew(copy: Tensor, saved: Tensor) -> Make:
    """How to make ``saved``, a view of ``copy``, of which nothing is kept."""
    make, view = vars(copy)[_MADE_BY], (saved.shape, saved.stride(), saved.storage_offset())

    def unpack() -> Tensor:
        with torch.no_grad():
            made: Tensor = make()
        return made.as_strided(*view)

    return unpack


def _unchanged(tensor: Tensor) -> Make:
    """How to have ``tensor`` again; autograd itself cannot look whether it was written to since, so this does."""
    same, before = tensor.detach(), version(tensor)

    def unpack() -> Tensor:
        if version(same) != before:
            raise LowVRAMError(
                f"a tensor {tuple(same.shape)} that a backward needs was written to after the call: call backward() "
                "before weights or inputs change"
            )
        return same

    return unpack
