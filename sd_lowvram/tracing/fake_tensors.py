"""Fake tensors in place of a model's weights for a while: nothing is copied, and the same objects are restored."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import FakeTensorMode
from ..memory.fake_mode import CPU, fake_empty
from ..weight_parts import describe_as, is_gguf, is_of_bitsandbytes, is_wrapper, links_of, parts_of, rebuilt, registered
from ..weights import wrap_gguf

Registry = MutableMapping[str, Any]


def fake_of(real: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor on the CPU with the shape, strides and type of ``real``, and a storage of its own.

    Args:
        real: any tensor; a quantised one gives one with fake parts.
        mode: makes the fake tensor.
    """
    if is_wrapper(real):
        return rebuilt(real, {id(part): fake_of(part, mode) for part in parts_of(real)})
    with torch.no_grad(), torch.inference_mode(False):
        fake = fake_empty(mode, real.shape, real.stride(), real.dtype, CPU)
        if isinstance(real, nn.Parameter):
            fake._is_param = True
        if is_gguf(real):
            wrap_gguf(fake, real)
        elif is_of_bitsandbytes(real):
            describe_as(fake, real, lambda part: fake_of(part, mode))
        return fake.requires_grad_(real.requires_grad) if real.is_leaf and real.requires_grad else fake


def fakes_of(models: Iterable[nn.Module], make: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """Return fake tensors for all tensors of ``models``, by the ids of these.

    Args:
        models: the models.
        make: returns the fake of a tensor without parts.
    """
    modules = [module for model in models for module in model.modules()]
    links = [link for module in modules for link in links_of(module)]
    weights = {id(tensor): tensor for _, _, tensor in registered(*modules)}
    parts = {id(part): part for link in links for part in link.parts}
    made = {key: make(tensor) for key, tensor in (weights | parts).items() if not is_wrapper(tensor)}
    made |= {id(link.value): made[id(link.memory)].detach() for link in links if link.memory is not None}
    for key, tensor in weights.items():
        if is_wrapper(tensor):
            made[key] = rebuilt(tensor, made)
        elif is_of_bitsandbytes(tensor):
            describe_as(made[key], tensor, lambda part: made[id(part)])
    return made


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
