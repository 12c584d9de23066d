"""Components that are moved whole and stay: on the device, or the decoder in host memory.

Source: consciencia's decoder on the CPU. Fidelity: ``bitwise``; a decoder that is widened on the CPU ``rounding``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import host_account, to_host
from ..memory.accounts import mark_host, unmark_host
from ..streaming.device_io import run_at
from ..weights import all_tensors, first_tensor, map_tensors, set_data


def run_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on the CPU in fp32, to which the weights have been widened; the result in the input's type."""
    first = first_tensor((args, kwargs))
    dtype = first.dtype if first is not None else torch.float32
    widen = functools.partial(map_tensors, convert=lambda t: t.float() if t.is_floating_point() else t)
    with host_account():
        args, kwargs = widen((args, kwargs))
        result = run_at(torch.device("cpu"), original, *args, **kwargs)
    return map_tensors(result, lambda t: t.to(dtype) if t.is_floating_point() else t)


def place(components: list[nn.Module], device: torch.device) -> Callable[[], None]:
    """Move everything to ``device``; returns the undoing."""
    return _moved(components, lambda data: data if data.device == device else data.to(device))


def widen_on_host(components: list[nn.Module]) -> Callable[[], None]:
    """Move everything to host memory, 16-bit floats widened; returns the undoing."""

    def moved(data: Tensor) -> Tensor:
        data = data if data.device.type == "cpu" else to_host(data, pin=False)
        with host_account():
            data = data.float() if data.is_floating_point() else data
        mark_host(data)
        return data

    return _moved(components, moved)


def _moved(components: list[nn.Module], move: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    places: list[tuple[Tensor, torch.device, torch.dtype]] = []

    def undo() -> None:
        for tensor, device, dtype in places:
            unmark_host(tensor.data)
            set_data(tensor, tensor.data.to(device, dtype))

    try:
        for tensor in all_tensors(*components):
            places.append((tensor, tensor.device, tensor.dtype))
            set_data(tensor, move(tensor.data))
    except BaseException:
        undo()
        raise
    return undo
