"""Number types: conversion, TF32, autocast, 16-bit storage with 32-bit arithmetic, and products alone in fp16.

Source: diffusers' memory and speed guide, Cerebrium; 16-bit storage with 32-bit arithmetic for GTX 16xx cards, whose
fp16 is broken, as in AUTOMATIC1111's upcast sampling. Fidelity: a wider type is ``rounding``, a narrower one
``approximate``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...compat import computes_on_cpu
from ...compat.private import FakeTensor
from ...errors import NoSiteError, SettingsError
from ...memory.fake_mode import fake_empty
from ...memory.threads import Shared
from ...models.anatomy import Anatomy
from ...models.latents import dtype_of
from ...patches import Change, Patch, replace, wrap
from ...settings import Fidelity, Settings
from ...streaming.followed import exchange_weights
from ...streaming.layers import lookup
from ...streaming.weight_scopes import lend_to_call
from ...weight_parts import is_in_parts, registered
from ...weights import (
    cast_activations,
    loaded_dtype,
    narrows,
    needs_graph,
    plain_weights,
    remember_loaded,
    same_bits,
    set_data,
)
from ..offers import Offer, OfferKind, Target
from .half_products import HalfProducts

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PRODUCTS = "fp16-products"


def precision(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch | Change]:
    """Compute in ``settings.precision``.

    An autoencoder whose configuration says ``force_upcast`` overflows in fp16 and is left in the type it has, and so is
    a component of which a library has quantised weights: its kernels are for the type of their scales.

    Args:
        anatomy: all its components with floating-point weights are changed.
        settings: ``precision`` is the number type.
        device: device that computes.

    Yields:
        Changes of weights, and patches of the entries that cast inputs.

    Raises:
        NoSiteError: the target holds no floating-point weights.
        SettingsError: tf32 away from an NVIDIA GPU, a type in which this torch cannot compute there, or fp16-products
            for a UNet.
    """
    if not any(tensor.is_floating_point() for tensor in plain_weights(*anatomy.components.values())):
        raise NoSiteError("precision: the model holds no floating-point weights")
    kind = settings.precision or ""
    if kind == "tf32":
        yield from _tf32(anatomy, device)
        return
    wanted = kind.removeprefix("autocast-").removesuffix("-products")
    _check_computable(kind, wanted, anatomy, device)
    if kind.startswith("autocast-"):
        warnings.warn(
            f"precision={kind!r} is slower than {wanted!r}, as weights are cast again in every call, and holds them as "
            "wide as they are",
            stacklevel=2,
        )
    for name, component in anatomy.components.items():
        stored, compute = _types(anatomy, name, settings)
        if compute is None:
            yield from _cast_entries(anatomy, name, anatomy.computes.get(name))
        elif kind == _PRODUCTS:
            yield from _widened_layers(component, _is_widened_beside_products)
            yield from (wrap(table, "forward", _widened_result, "precision") for table in _tables(component))
            yield from HalfProducts(name, component).patches(anatomy.entries[name])
        elif stored is None:
            yield from _autocast(anatomy, name, compute, device)
        else:
            yield Change(functools.partial(convert, component, stored), hook="precision")
            if stored != compute:
                yield from _widened_layers(component)
            yield from _cast_entries(anatomy, name, compute if stored != compute else None)
            yield from _cast_inside(component, compute)


def _check_computable(kind: str, wanted: str, anatomy: Anatomy, device: torch.device) -> None:
    if kind == _PRODUCTS and anatomy.residual_blocks:
        raise SettingsError(f"precision={kind!r} is for transformers, and {anatomy.denoiser} is a UNet: choose fp16")
    if wanted in _TYPES and device.type == "cpu" and not computes_on_cpu(_TYPES[wanted]):
        raise SettingsError(
            f"precision={kind!r}: torch {torch.__version__} cannot compute in {wanted} on a CPU; choose fp32, bf16 or "
            "fp16-storage"
        )


def offers(target: Target) -> Iterator[Offer]:
    """Offer a type of half the bytes if the picture may change, and fp16 products for transformers on a GPU without
    bf16.

    UNets are published in fp16. Transformers and their text encoders are made for bf16, whose largest values overflow
    in fp16, so fp16 is not offered for them; users may set it explicitly.
    """
    parts = target.anatomy.components
    sound = target.anatomy.family.known and "transformer" not in parts
    half = "fp16" if target.on_gpu and sound else "bf16"
    loaded = {dtype for dtype in map(loaded_dtype, plain_weights(*parts.values())) if dtype.is_floating_point}
    kinds = [half] * any(dtype.itemsize > 2 for dtype in loaded)
    kinds += [_PRODUCTS] * ("transformer" in parts and target.on_gpu and not target.rates.bf16)
    for kind in (None, *kinds) if target.approximate and kinds else ():
        yield Offer(OfferKind.WEIGHTS, {"precision": kind})


def _types(
    anatomy: Anatomy, name: str, settings: Settings
) -> tuple[torch.dtype, torch.dtype] | tuple[None, torch.dtype | None]:
    """The types in which ``settings`` have a component stored and computed; None for what stays as it is."""
    kind = settings.precision or ""
    fixed = is_in_parts(anatomy.components[name]) or (kind.endswith("fp16") and force_upcast(anatomy, name))
    if kind in ("", "tf32") or fixed:
        return None, None
    if kind == _PRODUCTS:
        return None, None if name == anatomy.autoencoder else torch.float16
    if kind == "fp16-storage":
        return torch.float16, torch.float32
    compute = _TYPES[kind.removeprefix("autocast-")]
    return (None, compute) if kind.startswith("autocast-") else (compute, compute)


class Arithmetic(NamedTuple):
    """Number types of a component's arithmetic and weights.

    Attributes:
        dtype: type of the arithmetic.
        converted: True if its weights are stored in another type than they were loaded in.
        overflows: True if ``dtype`` is fp16 and too narrow for it, so that its pipeline runs it in fp32.
        fidelity: distance from its own types: equal, wider, or narrower.
    """

    dtype: torch.dtype
    converted: bool
    overflows: bool
    fidelity: Fidelity


def arithmetic(anatomy: Anatomy, name: str, settings: Settings) -> Arithmetic:
    """Number types of the component ``name``, as it was loaded, with ``settings``.

    Args:
        anatomy: of the target.
        name: name of one of its components.
        settings: ``precision`` is read.
    """
    stored, compute = _types(anatomy, name, settings)
    dtype = compute or dtype_of(anatomy, name, as_loaded=True)
    loaded = {dtype for dtype in map(loaded_dtype, anatomy.components[name].parameters()) if dtype.is_floating_point}
    return Arithmetic(
        dtype,
        converted=stored is not None and bool(loaded - {stored}),
        overflows=dtype == torch.float16 and force_upcast(anatomy, name),
        fidelity=_fidelity(anatomy, name, settings),
    )


def widen_settings(settings: Settings) -> Settings:
    """``settings`` for a component that overflows in fp16, which its pipeline runs in fp32."""
    return dataclasses.replace(settings, precision="fp32")


def fidelity_of_knobs(settings: Settings) -> Fidelity:
    """Return the lowest fidelity of the decided knobs except ``precision``, which differs by component."""
    others = (knob.fidelity_of(value) for name, knob, value in settings.decided() if name != "precision" and value)
    return max(others, default=Fidelity.BITWISE)


def _fidelity(anatomy: Anatomy, name: str, settings: Settings) -> Fidelity:
    stored, compute = _types(anatomy, name, settings)
    if settings.precision == "tf32" or (settings.precision == _PRODUCTS and compute is not None):
        return Fidelity.APPROXIMATE
    if compute is None:
        return Fidelity.BITWISE
    loaded = {dtype for dtype in map(loaded_dtype, plain_weights(anatomy.components[name])) if dtype.is_floating_point}
    computed = {anatomy.computes.get(name, dtype) for dtype in loaded}
    if any(narrows(dtype, stored or compute) for dtype in loaded) or any(narrows(dtype, compute) for dtype in computed):
        return Fidelity.APPROXIMATE
    return Fidelity.ROUNDING if computed - {compute} else Fidelity.BITWISE


def convert(component: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Convert all floating weights to ``dtype``; return the function that undoes this.

    Weights that lose bits are stored in host memory meanwhile. A tensor that was changed in between (by a fused LoRA,
    say) keeps its new contents and only gets its type back.

    Args:
        component: the model.
        dtype: a floating-point type.

    Returns:
        A function that restores types and bits.
    """
    with contextlib.ExitStack() as undoing:
        for tensor in plain_weights(component):
            if tensor.is_floating_point() and tensor.dtype != dtype:
                loses = narrows(tensor.dtype, dtype) and not isinstance(tensor, FakeTensor)
                undoing.callback(_undo_cast, tensor, tensor.dtype, tensor.data.cpu() if loses else None, dtype)
                undoing.callback(remember_loaded(tensor, tensor.dtype))
                set_data(tensor, _cast(tensor, dtype))
        return undoing.pop_all().close


def _undo_cast(tensor: Tensor, before: torch.dtype, original: Tensor | None, dtype: torch.dtype) -> None:
    """Undo the conversion to ``dtype``; ``original`` is what it lost."""
    intact = original is not None and same_bits(original.to(dtype), tensor.data.cpu())
    set_data(tensor, original.to(tensor.device) if intact and original is not None else _cast(tensor, before))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The contents of ``tensor`` in another type."""
    if isinstance(tensor, FakeTensor):
        return fake_empty(tensor.fake_mode, tensor.shape, tensor.stride(), dtype, tensor.fake_device)
    return tensor.data.to(dtype)


def force_upcast(anatomy: Anatomy, name: str) -> bool:
    """True if the configuration of the component says that it overflows in fp16.

    diffusers writes ``force_upcast`` into every autoencoder, and only the pipelines of SDXL obey it. Autoencoders with
    the scaling factor of SD1.x and SD2.x do not overflow in fp16.
    """
    config = anatomy.config(name)
    sound = abs(float(config.get("scaling_factor") or 0) - 0.18215) < 1e-6
    return name == anatomy.autoencoder and bool(config.get("force_upcast")) and not sound


def _cast_entries(anatomy: Anatomy, name: str, dtype: torch.dtype | None) -> Iterator[Patch]:
    """Casts what other components hand to this one to ``dtype``; None: to the type that its own weights have."""
    component = anatomy.components[name]

    def cast(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wanted = dtype or next((t.dtype for t in component.parameters() if t.is_floating_point()), torch.float32)
        args, kwargs = cast_activations((args, kwargs), wanted)
        return original(*args, **kwargs)

    yield from (wrap(component, entry, cast, "precision") for entry in anatomy.entries[name])


def _cast_inside(component: Any, dtype: torch.dtype) -> Iterator[Patch]:
    """CompVis' UNet casts its input to a type that it notes when it is built, embeds time in float32, and has norms
    that take float32 and no other; torch's own works in float32 inside."""
    if isinstance(vars(component).get("dtype"), torch.dtype):
        yield replace(component, "dtype", dtype, "precision")
    embedding = getattr(component, "time_embed", None)
    if isinstance(embedding, nn.Module):

        def cast(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            args, kwargs = cast_activations((args, kwargs), dtype)
            return original(*args, **kwargs)

        yield wrap(embedding, "forward", cast, "precision")
    for norm in component.modules() if dtype != torch.float32 else ():
        if type(norm).__name__ == "GroupNorm32":
            yield wrap(norm, "forward", functools.partial(_norm_of_torch, norm), "precision")


def _norm_of_torch(norm: nn.GroupNorm, original: Callable[..., Any], x: Tensor) -> Tensor:
    return nn.GroupNorm.forward(norm, x)


def _autocast(anatomy: Anatomy, name: str, dtype: torch.dtype, device: torch.device) -> Iterator[Patch]:
    """Source: diffusers' memory and speed guide, which discourages it."""

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # each weight is used once a call, so caching its cast would only hold a second copy of the model
        with torch.autocast(device.type, dtype, cache_enabled=False):
            return original(*args, **kwargs)

    yield from (wrap(anatomy.components[name], entry, run, "precision") for entry in anatomy.entries[name])


def _tf32(anatomy: Anatomy, device: torch.device) -> Iterator[Patch]:
    if device.type != "cuda":
        raise SettingsError(f"precision='tf32' needs an NVIDIA GPU and the device is {device}: use fp32")

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _tf32_on():
            return original(*args, **kwargs)

    for name, component in anatomy.components.items():
        yield from (wrap(component, entry, run, "precision") for entry in anatomy.entries[name])


@contextlib.contextmanager
def _allow_tf32() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


_tf32_on = Shared(_allow_tf32)


def _widened_layers(component: nn.Module, which: Callable[[nn.Module], bool] = lambda layer: True) -> Iterator[Patch]:
    """Every layer, or each of ``which``, sees its weights and its inputs in fp32 while it runs."""
    for module in component.modules():
        if which(module) and _floating(module):
            yield wrap(module, "forward", functools.partial(_run_widened, module), "precision")


def _is_widened_beside_products(layer: nn.Module) -> bool:
    """A table that is looked up stays as it is, in host memory."""
    return not isinstance(layer, nn.Linear) and not lookup(layer)


def _tables(component: nn.Module) -> Iterator[nn.Module]:
    return (module for module in component.modules() if lookup(module) == "forward")


def _widened_result(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return original(*args, **kwargs).float()


def _floating(module: nn.Module) -> list[Tensor]:
    """Floating weights that the module itself holds."""
    return [tensor for _, _, tensor in registered(module) if tensor.is_floating_point()]


def _run_widened(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast_activations((args, kwargs), torch.float32)
    floating = _floating(module)
    follows = needs_graph(module, args, kwargs)
    with exchange_weights(module, floating, Tensor.float) if follows else lend_to_call(floating, Tensor.float):
        return original(*args, **kwargs)
