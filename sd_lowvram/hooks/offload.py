"""Where weights live: all on the device, one component at a time, or one layer at a time. Synchronous and plain.

Source: basujindal's split model; diffusers' model and sequential offload. Fidelity: ``bitwise``.

Inputs follow the component to its device and its outputs go back to where the inputs came from, so that a pipeline
whose weights wait in host memory is called just as before. On a CPU-only machine the weights really are copied between
the device's account and the host's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConflictError, NoSiteError
from ..memory import host_account, to_device, to_host
from ..memory.accounts import actual_device, mark_host, unmark_host
from ..models.anatomy import Anatomy
from ..patches import Change, Patch, wrap
from ..settings import Settings
from ..weights import all_tensors, first_tensor, lent, map_tensors, own_tensors, set_data
from .lending import lent_to_call


def offload(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch | Change]:
    """Keep the weights as ``settings.offload`` and ``settings.decoder_device`` say.

    Raises:
        ConflictError: accelerate's own offloading is on.
        NoSiteError: the target has no component whose weights could wait, or no decoder for the CPU.
    """
    components = dict(anatomy.components)
    _refuse_accelerate(components)
    decoder_on_cpu = settings.decoder_device == "cpu"
    if decoder_on_cpu:
        if anatomy.autoencoder is None:
            raise NoSiteError("decoder device: the target has no autoencoder")
        vae = components.pop(anatomy.autoencoder)
        yield Change(functools.partial(_settle_on_host, [vae], True), hook="decoder_device")
        yield from _entries(anatomy, anatomy.autoencoder, _run_on_cpu, "decoder_device")
    if settings.offload in (None, "none"):
        yield Change(functools.partial(_place, list(components.values()), device), hook="offload")
        if decoder_on_cpu:
            for name in components:
                yield from _entries(anatomy, name, functools.partial(_run_at, device), "offload")
        return
    if not components:
        return
    yield Change(functools.partial(_settle_on_host, list(components.values()), False), hook="offload")
    if settings.offload == "component":
        residency = _Residency(device)
        yield Change(lambda: residency.evict, hook="offload")
        for name, component in components.items():
            yield from _entries(anatomy, name, functools.partial(residency.run, component), "offload")
    else:
        for name, component in components.items():
            yield from _layer_by_layer(anatomy, name, component, device)


def _entries(anatomy: Anatomy, name: str, around: Callable[..., Any], hook: str) -> Iterator[Patch]:
    yield from (wrap(anatomy.components[name], entry, around, hook) for entry in anatomy.entries[name])


def _refuse_accelerate(components: dict[str, nn.Module]) -> None:
    for name, component in components.items():
        hooked = any(hasattr(module, "_hf_hook") for module in component.modules())
        if hooked or getattr(component, "_diffusers_hook", None) is not None:
            raise ConflictError(
                f"{name} is already offloaded by accelerate or diffusers: call pipe.remove_all_hooks() before "
                "optimize(), or pass Settings without offload"
            )


def _run_at(device: torch.device, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on ``device``; the result goes back to where the first input came from."""
    first = first_tensor((args, kwargs))
    home = first.device if first is not None else device
    args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(actual_device(device)))
    return _sent(original(*args, **kwargs), home)


def _sent(result: Any, home: torch.device) -> Any:
    distribution = getattr(result, "latent_dist", None)
    if distribution is not None:  # an encoder's answer: a plain object that no tree walk enters
        for name, held in vars(distribution).items():
            if isinstance(held, Tensor):
                setattr(distribution, name, held.to(home))
        return result
    return map_tensors(result, lambda tensor: tensor.to(home))


def _run_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on the CPU in fp32, to which the weights have been widened; the result in the input's type."""
    first = first_tensor((args, kwargs))
    dtype = first.dtype if first is not None else torch.float32
    widen = functools.partial(map_tensors, convert=lambda t: t.float() if t.is_floating_point() else t)
    with host_account():
        args, kwargs = widen((args, kwargs))
        result = _run_at(torch.device("cpu"), original, *args, **kwargs)
    return map_tensors(result, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _place(components: list[nn.Module], device: torch.device) -> Callable[[], None]:
    """Move everything to ``device``; returns the undoing."""
    return _moved(components, lambda data: data if data.device == device else data.to(device))


def _settle_on_host(components: list[nn.Module], widen: bool) -> Callable[[], None]:
    """Move everything to host memory, 16-bit floats widened on request; returns the undoing."""

    def settle(data: Tensor) -> Tensor:
        data = data if data.device.type == "cpu" else to_host(data)
        with host_account():
            data = data.float() if widen and data.is_floating_point() else data
        mark_host(data)
        return data

    return _moved(components, settle)


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


class _Residency:
    """The one component whose weights are on the device now. They move rather than being copied, so that what is
    fused into them while they are there comes back with them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resident: nn.Module | None = None

    def run(self, component: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.resident is not component:
            self.evict()
            self.resident = component
            self._move(lambda data: to_device(data, self.device, weight=True))
        elif self.device.type != "cpu":  # a LoRA or adapter that was loaded since waits elsewhere
            self._move(lambda data: data if data.device == self.device else data.to(self.device))
        return _run_at(self.device, original, *args, **kwargs)

    def evict(self) -> None:
        self._move(to_host)
        self.resident = None

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        if self.resident is not None:
            with torch.inference_mode(False):
                for tensor in all_tensors(self.resident):
                    set_data(tensor, move(tensor.data))


def _layer_by_layer(anatomy: Anatomy, name: str, component: nn.Module, device: torch.device) -> Iterator[Patch]:
    layers = [module for module in component.modules() if any(True for _ in own_tensors(module))]
    if not layers:
        raise NoSiteError(f"offload: {name} holds no weights")
    known = set(map(id, layers))
    fetch = functools.partial(to_device, device=device, weight=True)

    def run_layer(layer: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lent_to_call(own_tensors(layer), fetch):
            return original(*args, **kwargs)

    def run_component(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # layers that came after us (a LoRA's) have no patch: theirs are small and lent for the whole call
        newcomers = [t for m in component.modules() if id(m) not in known for t in own_tensors(m)]
        with lent(newcomers, fetch):
            return _run_at(device, original, *args, **kwargs)

    for layer in layers:
        if layer is not component:
            yield wrap(layer, "forward", functools.partial(run_layer, layer), "offload")
    yield from _entries(anatomy, name, run_component, "offload")
