"""Components that are moved whole: all to the device, to host memory for good, or in turns.

Source: diffusers' model offload; consciencia's decoder on the CPU. Fidelity: ``bitwise``; a decoder that is widened on
the CPU ``rounding``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..memory import host_account, to_device, to_host
from ..memory.accounts import mark_host, tracing, unmark_host
from ..memory.host_offload import give_pinned_back, is_pinned, unpinned
from ..streaming.device_io import refuse_unseen, run_at
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


def move_to_host(components: list[nn.Module], widen: bool) -> Callable[[], None]:
    """Move everything to host memory, 16-bit floats widened on request; returns the undoing."""

    def moved(data: Tensor) -> Tensor:
        data = data if data.device.type == "cpu" else to_host(data)
        with host_account():
            data = data.float() if widen and data.is_floating_point() else data
        mark_host(data)
        return data

    return _moved(components, moved)


def _moved(components: list[nn.Module], move: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    places: list[tuple[Tensor, torch.device, torch.dtype, bool]] = []

    def undo() -> None:
        for tensor, device, dtype, pinned in places:
            unmark_host(tensor.data)
            data = tensor.data.to(device, dtype)
            set_data(tensor, data if pinned else unpinned(data))
            del data
            give_pinned_back()

    try:
        for tensor in all_tensors(*components):
            places.append((tensor, tensor.device, tensor.dtype, is_pinned(tensor)))
            set_data(tensor, move(tensor.data))
    except BaseException:
        undo()
        raise
    return undo


class Residency:
    """The one component whose weights are on the device now. They move rather than being copied, so that what is
    fused into them while they are there comes back with them. Fake weights in a trace move apart from real ones."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._real: nn.Module | None = None
        self._fake: tuple[nn.Module, Any] | None = None

    @property
    def resident(self) -> nn.Module | None:
        if not tracing():
            return self._real
        component, first = self._fake or (None, None)
        return component if component is not None and next(component.parameters(), None) is first else None

    @resident.setter
    def resident(self, component: nn.Module | None) -> None:
        if not tracing():
            self._real = component
        else:  # of an earlier trace, whose tensors are gone, nothing is here
            self._fake = None if component is None else (component, next(component.parameters(), None))

    def run(self, component: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse_unseen(component)
        if self.resident is not component:
            self.evict()
            self.resident = component
            self._move(lambda data: to_device(data, self.device, weight=True))
        elif self.device.type != "cpu":  # a LoRA or adapter that was loaded since waits elsewhere
            self._move(lambda data: data if data.device == self.device else data.to(self.device))
        return run_at(self.device, original, *args, **kwargs)

    def evict(self) -> None:
        self._move(to_host)
        self.resident = None

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        if self.resident is not None:
            with torch.inference_mode(False):
                for tensor in all_tensors(self.resident):
                    set_data(tensor, move(tensor.data))
