"""Weights of linear and convolution layers in 8 bits, widened layer by layer when they are used.

Source: ours; scales for each output channel as is usual in quantisation. Fidelity: ``approximate``.

Halves the bytes of a 16-bit model on the device and over the bus. The autoencoder keeps its weights, as its errors go
straight into the picture, and so do the first and last convolution of a UNet. The originals wait in host memory, or in
the file that they are mapped from, and come back when the hook goes. LoRAs keep their whole effect while they are
layers of their own; fused into 8 bits they would lose it, which is refused. Where autograd follows a call, gradients
are those of what it computed; the stored weights get none, and a backward that asks for theirs is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...compat.private import FakeTensor
from ...errors import ConflictError, NoSiteError
from ...kernels.quantised import quantise, widen
from ...memory import to_host
from ...memory.fake_mode import active_fake_mode
from ...memory.threads import pause_models
from ...models.anatomy import Anatomy
from ...patches import Change, Patch, roles_of, wrap
from ...settings import Settings
from ...streaming.followed import exchange_weights
from ...streaming.weight_scopes import lend_to_call, present_rows
from ...weights import loaded_dtype, needs_graph, remember_loaded, set_data
from ..offers import Offer, OfferKind, Target

_REFUSED = {
    "fuse_lora": "a LoRA cannot be fused into weights of 8 bits: use it unfused, or restore(), fuse it and optimize()",
    "unfuse_lora": "a LoRA cannot be taken out of weights of 8 bits: restore(), unfuse it and optimize()",
    "save_pretrained": "weights of 8 bits are not saved: restore() the model first",
}
_REFUSED_PLAINLY = "weights of 8 bits are neither merged with a LoRA nor saved: leave weight storage alone for that"
_KEPT = ("conv_in", "conv_out")


def weight_storage(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch | Change]:
    """Store the weights of denoiser, ControlNet and text encoders in ``settings.weight_storage``.

    Args:
        anatomy: linear layers and convolutions of these components are changed.
        settings: ``weight_storage`` is "int8" or "fp8".
        device: device that computes.

    Yields:
        A change for each weight, a patch of each layer that widens its weight for the call, and refusals of what needs
        full weights (fusing a LoRA, saving).

    Raises:
        NoSiteError: none of these has a linear or convolution layer with floating-point weights.
        ConflictError: an earlier plan or attachment streams these weights: its copies would stay unquantised.
    """
    stored: dict[int, _Stored] = {}
    for name, component in anatomy.components.items():
        layers = quantised_layers(anatomy, name)
        if layers and any(hook == "offload" for _, hook, _ in roles_of(component)):
            raise ConflictError(
                f"{name} streams its weights by an earlier plan or attachment, and so they cannot become 8 bits: "
                "restore() what has that first, or ask for both at once",
                plainly=f"{name} streams its weights already, and so they cannot become 8 bits: ask for both at once",
            )
        for layer in layers:
            key = id(layer.weight)
            if key not in stored:  # tied layers share one
                stored[key] = _Stored(layer.weight, settings.weight_storage or "", device)
                yield Change(stored[key].store, hook="weight_storage")
            yield wrap(layer, "forward", functools.partial(stored[key].run, layer), hook="weight_storage")
        if layers:
            yield from _refusals(component)
    if not stored:
        raise NoSiteError("weight storage: no UNet or text encoder with floating-point weights (a VAE keeps its own)")


def quantised_layers(anatomy: Anatomy, name: str, as_loaded: bool = False) -> list[Any]:
    """The layers of the component ``name`` whose weights the hook stores in 8 bits: those of torch, and those that say
    by an attribute ``stored_by_rows`` that their ``weight`` (rows, ...) may have a scale for each row.

    Args:
        as_loaded: also those that are stored so already, for plans that are made meanwhile.
    """
    if name != anatomy.denoiser and not name.startswith(("text_encoder", "controlnet")):
        return []
    return [
        module
        for path, module in anatomy.components[name].named_modules()
        if (isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or getattr(module, "stored_by_rows", False))
        and path not in _KEPT
        and not path.endswith(".image_embeds")  # its owner casts the input to the weight's type before it calls it
        and "lora_" not in path
        and type(module.weight) in (nn.Parameter, Tensor, FakeTensor)
        and _is_wide(loaded_dtype(module.weight) if as_loaded else module.weight.dtype)
        # its owner reads this layer's weight without calling it
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    ]


def offers(target: Target) -> Iterator[Offer]:
    """Offer int8 if the picture may change: it is nearer to full weights than fp8, and of the same size."""
    parts = target.anatomy.components
    if target.approximate and target.fixed.weight_storage is None:
        with pause_models(parts.values()):
            stored = any(quantised_layers(target.anatomy, name, as_loaded=True) for name in parts)
        if stored:
            yield Offer(OfferKind.WEIGHTS, {"weight_storage": None})
            yield Offer(OfferKind.WEIGHTS, {"weight_storage": "int8"})


def _is_wide(dtype: torch.dtype) -> bool:
    """True if 8 bits would save bytes: the weights are wider than that."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _refusals(component: nn.Module) -> Iterator[Patch]:
    def refuse(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise ConflictError(f"{name}: {_REFUSED[name]}", plainly=_REFUSED_PLAINLY)

    for name in _REFUSED:
        if hasattr(component, name):
            yield wrap(component, name, functools.partial(refuse, name), hook="weight_storage_refusal")


class _Stored:
    """A weight in 8 bits, its scales on the compute device, and its original."""

    def __init__(self, weight: Tensor, kind: str, device: torch.device) -> None:
        self._weight = weight
        self._kind = kind
        self._device = device
        self._scale = self._original = weight
        self._trained = weight.requires_grad
        self._widen = self._widened  # compared by identity, and each access would make another bound method

    def store(self) -> Callable[[], None]:
        """Exchange the contents for 8 bits; returns the undoing."""
        weight, before = self._weight, self._weight.data
        self._trained, home = weight.requires_grad, before.device
        with torch.inference_mode(False), torch.no_grad():
            eight, self._scale = _quantise_on(before, self._kind, self._device)
            self._original = before if before.device.type == "cpu" else to_host(before, pin=False)
            weight.requires_grad_(False)  # integers cannot be trained
            set_data(weight, eight)
        forget = remember_loaded(weight, before.dtype)

        def undo() -> None:
            forget()
            with torch.inference_mode(False):
                if weight.dtype == eight.dtype:  # else a host has loaded other weights since, which stay
                    set_data(weight, self._original.to(home))
                weight.requires_grad_(self._trained)
                self._original = self._scale = weight

        return undo

    def run(self, layer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The layer's forward with the weight widened."""
        # Where autograd follows the whole call, the engine puts copies in place of weights.
        copied = layer.weight is not self._weight
        if copied or needs_graph(layer, args, kwargs) or (self._trained and torch.is_grad_enabled()):
            with exchange_weights(layer, [layer.weight], functools.partial(self._widen_followed, self._scale)):
                return original(*args, **kwargs)
        with lend_to_call([self._weight], self._widen):
            return original(*args, **kwargs)

    def _widen_followed(self, scale: Tensor, weight: Tensor) -> Tensor:
        """The widened weight for a call that autograd follows."""
        data = weight.detach()
        wide = data if data.is_floating_point() else widen(data, scale.to(data.device))
        trained = torch.zeros((), requires_grad=self._trained, device=wide.device)
        followed: Tensor = _Untrainable.apply(wide, trained)  # type: ignore[no-untyped-call]
        return followed

    def _widened(self, data: Tensor) -> Tensor:
        if data.is_floating_point():
            return data
        if self._scale.device != data.device:
            self._scale = self._scale.to(data.device)
        return widen(data, self._scale[present_rows()])


class _Untrainable(torch.autograd.Function):
    """A widened weight whose own gradient nobody may have: the weight is integers, and would silently stay as it is."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, trained: Tensor) -> Tensor:
        return wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConflictError(
            "weights of 8 bits get no gradients: for those of the inputs call requires_grad_(False) on the model "
            "before optimize(), and to train the weights use Settings without weight_storage",
            plainly="weights of 8 bits cannot be trained: leave weight storage alone for that",
        )


def _quantise_on(weight: Tensor, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 8 bits where ``weight`` is, the scales on ``device``, which does the arithmetic faster than a CPU would."""
    if active_fake_mode(weight) is None and not weight.is_meta:
        stored, scale = quantise(weight.to(device), kind)
        return stored.to(weight.device), scale
    stored = torch.empty_like(weight, dtype=torch.uint8 if kind == "fp8" else torch.int8)
    return stored, weight.new_empty((len(weight), *[1] * (weight.dim() - 1)))
