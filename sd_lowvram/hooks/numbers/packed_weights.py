"""Copies of large convolutions' weights in the memory order of a CPU's kernels.

Copies are made at a call, for layers of the denoiser whose maps are small compared with their weights, and freed when
another component runs. They follow the weights of the call: other weights (a merged LoRA) get new copies.
Fidelity: ``rounding`` (the kernel takes maps channels last).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import autocast_dtype
from ...compat.private import tree_flatten
from ...errors import NoSiteError, SettingsError
from ...kernels import packed
from ...memory.fake_mode import active_fake_mode
from ...models.anatomy import Anatomy
from ...patches import Patch, wrap
from ...settings import Settings
from ...streaming.layers import contents
from ...units import MIB
from ..offers import Offer, OfferKind, Target
from ..replay.compiled import is_compiled, is_followed

_LEAST_BYTES = 4 * MIB
"""Smallest weight that is worth a copy: smaller ones stay in the processor's cache while they are reordered."""

_MOST_PIXELS = 512
"""Largest map, batch included, for which reordering a weight takes a fifth of the time or more."""


def packed_weights(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's large convolutions with reordered weights.

    Args:
        anatomy: large convolutions of its denoiser are patched.
        settings: ``compile`` is read: compiled code calls an operator of ours.
        device: must be a CPU.

    Yields:
        A patch for each convolution and for each entry of the components.

    Raises:
        NoSiteError: the denoiser has no convolution with weights of 4 MiB or more.
        SettingsError: the device is not a CPU.
    """
    why = packed.why_not(device)
    if why is not None:
        raise SettingsError(f"packed_weights: {why}")
    layers = packable(anatomy)
    if not layers:
        raise NoSiteError("packed weights: the model has no denoiser with convolutions of 4 MiB or more")
    copies = _Copies(anatomy, layers)
    compiles = is_compiled(settings)
    if compiles:
        packed.provide_operator()
    for conv in layers:
        around = functools.partial(_run_packed, copies) if compiles else functools.partial(copies.run_convolution, conv)
        yield wrap(conv, "_conv_forward", around, "packed_weights")
    for name, component in anatomy.components.items():
        entered = copies.entered_by_code if compiles else copies.enter_call
        taking = entered if name == anatomy.denoiser else copies.elsewhere
        for entry in anatomy.entries[name]:
            yield wrap(component, entry, taking, "packing")


def offers(target: Target) -> Iterator[Offer]:
    """Offer packed weights first on a CPU, in fp32 only, and not together with compiling, which was measured without
    them.
    """
    if packed.why_not(target.device) is None and packable(target.anatomy):
        yield Offer(
            OfferKind.INSTEAD,
            {"packed_weights": True},
            level=-1,
            stages=("denoise",),
            goes_with=lambda settings: settings.precision in (None, "fp32") and not is_followed(settings),
        )


def packable(anatomy: Anatomy) -> list[nn.Conv2d]:
    """The denoiser's convolutions with large weights."""
    modules = anatomy.denoiser_module.modules() if anatomy.denoiser_module is not None else ()
    return [module for module in modules if isinstance(module, nn.Conv2d) and _is_large(module)]


def _is_large(conv: nn.Conv2d) -> bool:
    plain = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    return plain and conv.weight.numel() * conv.weight.element_size() >= _LEAST_BYTES


def _maps(anatomy: Anatomy, height: int, width: int) -> Iterator[tuple[nn.Module, int, int]]:
    """The modules of the denoiser with the sides of the maps that their convolutions work on."""
    path = anatomy.unet_path
    blocks = {site.module for site in (*anatomy.residual_blocks, *anatomy.transformer_blocks)}
    for number, module in enumerate(path.modules if path is not None else ()):
        samples = number > 0 and blocks.isdisjoint(module.modules())
        shrinks = path is not None and module in path.makers
        if samples and not shrinks:
            height, width = 2 * height, 2 * width
        yield module, height, width
        if samples and shrinks:
            height, width = -(-height // 2), -(-width // 2)


class _Copies:
    """Weights in order, by layer, each with what it was made of."""

    def __init__(self, anatomy: Anatomy, layers: list[nn.Conv2d]) -> None:
        self._anatomy, self._layers = anatomy, set(layers)
        self._made: dict[nn.Conv2d, tuple[Any, Tensor]] = {}
        self._shape: Any = None

    def enter_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of the denoiser: copies are there before its first layer runs, as they are at later steps."""
        maps = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.dim() == 4)
        x = next(maps, None)
        if x is not None and (x.shape[0], *x.shape[2:]) != self._shape:
            self._made.clear()
            self._shape = x.shape[0], *x.shape[2:]
            for module, height, width in _maps(self._anatomy, *x.shape[2:]):
                if len(x) * height * width <= _MOST_PIXELS:
                    self._keep(module, (len(x), height, width))
        return original(*args, **kwargs)

    def entered_by_code(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same where blocks are compiled, whose code takes what there is: all of the weights as they are now."""
        if any(entry[0] != contents([conv.weight]) for conv, entry in self._made.items()):
            self._shape = None

        def run(*args: Any, **kwargs: Any) -> Any:
            with packed.provide_copies({conv.weight.data_ptr(): entry[1] for conv, entry in self._made.items()}):
                return original(*args, **kwargs)

        return self.enter_call(run, *args, **kwargs)

    def _keep(self, module: nn.Module, shape: tuple[int, int, int]) -> None:
        batch, *sides = shape
        for conv in module.modules():
            if isinstance(conv, nn.Conv2d) and conv in self._layers and conv.weight.dtype == torch.float32:
                self._make(conv, conv.weight, (batch, conv.in_channels, *sides))

    def _make(self, conv: nn.Conv2d, weight: Tensor, shape: Sequence[int]) -> Tensor:
        copy = packed.pack(weight, _conv_params(conv), shape)
        self._made[conv] = contents([weight]), copy
        return copy

    def run_convolution(
        self,
        conv: nn.Conv2d,
        original: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Around what a convolution does with the weight that it is called with."""
        entry = self._made.get(conv)
        if entry is None or args or kwargs or not _takes(x, weight):
            return original(x, weight, bias, *args, **kwargs)
        copy = entry[1] if entry[0] == contents([weight]) else self._make(conv, weight, x.shape)
        return packed.convolve(x, copy, bias, _conv_params(conv))

    def elsewhere(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Free the copies before a call of another component."""
        self._made.clear()
        self._shape = None
        return original(*args, **kwargs)


def _run_packed(
    copies: _Copies, original: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Around what a convolution does, where it may be compiled: of no layer, so that equal ones share their code."""
    conv = original.__self__
    if not torch.compiler.is_compiling() or args or kwargs:
        return copies.run_convolution(conv, original, x, weight, bias, *args, **kwargs)
    how = (list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups)
    result: Tensor = torch.ops.sd_lowvram.convolve_kept(x, weight, bias, *how)
    return result


def _conv_params(conv: nn.Conv2d) -> packed.ConvParams:
    padding, stride, dilation = (tuple(map(int, of_side)) for of_side in (conv.padding, conv.stride, conv.dilation))
    return packed.ConvParams(padding, stride, dilation, conv.groups)


def _takes(x: Tensor, weight: Tensor) -> bool:
    single = x.dim() == 4 and x.dtype == weight.dtype == torch.float32 and autocast_dtype("cpu") is None
    here = x.device.type == "cpu" or active_fake_mode(x) is not None
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return single and here and not learns
