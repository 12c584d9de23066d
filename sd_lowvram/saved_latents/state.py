"""State of a scheduler between steps, as JSON and tensors, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import LowVRAMError
from ..patches import unpatched_attributes

_PLAIN = (bool, int, float, str)


class UnkeptStateError(LowVRAMError):
    """A scheduler that remembers what no file can hold (a sampler of noise, for one)."""


def current_state(scheduler: Any) -> dict[str, Any]:
    """Current state of ``scheduler``. Tensors are not copied, because each step makes new ones."""
    own = {
        name: value for name, value in unpatched_attributes(scheduler).items() if name != "_internal_dict"
    }  # its configuration
    return {name: list(value) if isinstance(value, list) else value for name, value in own.items()}


def configuration(scheduler: Any) -> dict[str, Any]:
    """The configuration of ``scheduler`` as JSON has it, without notes of the library."""
    plain = {name: value for name, value in scheduler.config.items() if not name.startswith("_")}
    own: dict[str, Any] = json.loads(json.dumps(plain, default=str))
    return own


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON; tensors in it go to ``tensors``, by names that begin with ``name``.

    Raises:
        UnkeptStateError: something in it is neither a number, a text, a tensor, an array nor a list of those.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        items = [pack(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        # Kernels are chosen by the layout in memory too, and with them the last bits.
        strides = list(value.stride()) if _is_dense(value.shape, value.stride()) else None
        return {"kind": "tensor", "name": name, "on_device": value.device.type != "cpu", "strides": strides}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biuf":
        import numpy

        tensors[name] = torch.from_numpy(numpy.array(value))
        return {"kind": "array", "name": name, "scalar": not isinstance(value, numpy.ndarray)}
    raise UnkeptStateError(f"its {name.rpartition('/')[2]} is a {type(value).__name__}")


def unpack(tree: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    """Restore what :func:`pack` packed; tensors that were on a device go to ``device``.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: ``tree`` was not made by :func:`pack`.
    """
    if not isinstance(tree, dict):
        return tree
    if tree["kind"] in ("list", "tuple"):
        items = [unpack(item, tensors, device) for item in tree["items"]]
        return items if tree["kind"] == "list" else tuple(items)
    tensor = tensors[tree["name"]]
    if tree["kind"] == "tensor":
        strides = tree["strides"]
        if strides is not None:
            if not _is_dense(tensor.shape, strides):
                raise ValueError(f"{tree['name']} cannot lie so in memory")
            tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
        return tensor.to(device) if tree["on_device"] else tensor
    array = tensor.numpy()
    return array[()] if tree["scalar"] else array


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements fill the memory between the first and the last of them."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return min(strides, default=1) >= 0 and last + 1 == math.prod(shape)
