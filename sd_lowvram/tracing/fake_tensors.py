"""A model made of fake tensors for a while: nothing is copied, and the very same objects come back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Registry = MutableMapping[str, Any]
CPU = torch.device("cpu")


def active_fake_mode(*tensors: Tensor) -> FakeTensorMode | None:
    """The mode that the caller is inside of, or that made these tensors."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, FakeTensorMode):
            return mode
    return None


def fake_of(real: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of ``mode`` on the CPU, of the same shape, strides and type, with a storage of its own."""
    with torch.no_grad(), torch.inference_mode(False):
        fake = fake_empty(mode, real.shape, real.stride(), real.dtype, CPU)
        if isinstance(real, nn.Parameter):
            fake._is_param = True  # type: ignore[attr-defined]
        return fake.requires_grad_(real.requires_grad) if real.is_leaf and real.requires_grad else fake


def fake_empty(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What ``torch.empty_strided`` makes in ``mode``, without asking it: it takes its time."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return fake_around(meta, mode, device)


def fake_around(meta: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor around ``meta``: the first of a mode by torch's own slow constructor, the others like it."""
    alike: dict[torch.device, dict[str, Any]] = vars(mode).setdefault("_sd_lowvram_alike", {})
    if device not in alike:
        first = FakeTensor(mode, meta, device)
        alike[device] = dict(vars(first))
        return first
    fake: Tensor = Tensor._make_subclass(  # type: ignore[attr-defined]
        FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    vars(fake).update(alike[device])
    return fake


def modules_of(*values: Any) -> list[nn.Module]:
    """The modules that these values are, are methods of, or close over."""
    found: dict[int, nn.Module] = {}
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif callable(value):
            waiting.append(getattr(value, "__self__", None))
            waiting += [cell.cell_contents for cell in _cells(value)]
    return list(found.values())


def _cells(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cell.cell_contents  # noqa: B018
            yield cell


@contextlib.contextmanager
def faked(modules: list[nn.Module], fake: Callable[[Tensor, Registry, str], Tensor]) -> Iterator[None]:
    """Inside, every parameter and buffer of ``modules`` is ``fake`` of it; after, and after an error, as before.

    Args:
        fake: from a tensor, the dictionary that it stands in, and its name there, to the fake one.
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
