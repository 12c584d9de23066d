"""Fake tensors in place of a model's weights for a while: nothing is copied, and the same objects are restored."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import FakeTensorMode
from ..memory.fake_mode import CPU, fake_empty
from ..weights import is_gguf, wrap_gguf

Registry = MutableMapping[str, Any]


def fake_of(real: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor on the CPU with the shape, strides and type of ``real``, and a storage of its own.

    Args:
        real: any tensor; a GGUF one gives a GGUF one.
        mode: makes the fake tensor.
    """
    with torch.no_grad(), torch.inference_mode(False):
        fake = fake_empty(mode, real.shape, real.stride(), real.dtype, CPU)
        if isinstance(real, nn.Parameter):
            fake._is_param = True
        if is_gguf(real):
            wrap_gguf(fake, real)
        return fake.requires_grad_(real.requires_grad) if real.is_leaf and real.requires_grad else fake


def modules_of(*values: Any) -> list[nn.Module]:
    """The modules that these values are, are methods of, or close over."""
    modules: dict[int, nn.Module] = {}
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            modules[id(value)] = value
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif callable(value):
            waiting += [getattr(value, "__self__", None), getattr(value, "__wrapped__", None)]
            waiting += [cell.cell_contents for cell in _cells(value)]
    return list(modules.values())


def _cells(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents  # noqa: B018
            yield cell


@contextlib.contextmanager
def replace_by_fakes(modules: list[nn.Module], fake: Callable[[Tensor, Registry, str], Tensor]) -> Iterator[None]:
    """Replace every parameter and buffer of ``modules`` by a fake tensor within the block; restore them in any case.

    Args:
        modules: roots; modules below them are included.
        fake: function from a tensor, the dictionary that holds it, and its name there, to the fake tensor.
    """
    registries: dict[int, Registry] = {
        id(registry): registry
        for root in modules
        for module in root.modules()
        for registry in (module._parameters, module._buffers)
    }
    before = [(registry, dict(registry)) for registry in registries.values()]
    try:
        for registry, entries in before:
            for name, tensor in entries.items():
                if tensor is not None:
                    registry[name] = fake(tensor, registry, name)
        yield
    finally:
        for registry, entries in before:
            registry.clear()
            registry.update(entries)
