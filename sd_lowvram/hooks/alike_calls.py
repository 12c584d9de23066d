"""What tells calls of a model apart for what is recorded of one and run again for all that are alike.

Calls are alike where types, shapes, autocast and all that is no tensor are equal, and where the model is: a LoRA, an
adapter's strength or a weight at another place makes it another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compat import autocast_dtype

_PLAIN = (bool, int, float, str)


def kind_of(leaves: list[Any], spec: Any, device_type: str) -> Any:
    """What calls with the arguments ``leaves`` of a tree ``spec`` share where they are alike; None: one of those is
    nothing that could be compared."""
    known = all(isinstance(leaf, (Tensor, *_PLAIN, torch.dtype, torch.device, type(None))) for leaf in leaves)
    return (spec, tuple(map(_told, leaves)), autocast_dtype(device_type)) if known else None


def facts_of(model: nn.Module) -> Any:
    """What a recorded pass has taken in of the model besides its weights' values; None: of others' hooks, too."""
    found: list[Any] = []
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        found.append(id(module))
        for held in (module, getattr(module, "processor", None)):
            found += [_value(value) for name, value in getattr(held, "__dict__", {}).items() if _counts(name, value)]
        held_tensors = (*module._parameters.values(), *module._buffers.values())
        found += [tensor.data_ptr() for tensor in held_tensors if tensor is not None]
    return hash(tuple(found))


def _counts(name: str, value: Any) -> bool:
    """Whether it is a setting, such as an adapter's strength."""
    return isinstance(value, (*_PLAIN, list, tuple, dict)) and (not name.startswith("_") or "adapter" in name)


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return tuple(one for one in value if isinstance(one, _PLAIN)) if isinstance(value, (list, tuple)) else value


def _told(leaf: Any) -> Any:
    """What tells one call's argument from another's: its kind where it is a tensor, else its value."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return leaf
