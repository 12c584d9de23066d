"""Channels-last memory format of the convolutions' weights; activations follow it by themselves.

Weights that wait in a mapped file stay there in the file's order, as a copy would hold memory for good: they are
brought in order whenever they are copied from it.

Source: diffusers' memory and speed guide. Fidelity: ``rounding`` (other convolution kernels).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ...errors import NoSiteError
from ...memory.fake_mode import active_fake_mode
from ...models.anatomy import Anatomy
from ...patches import Change
from ...settings import Settings
from ...streaming.host_weights import tensors_in_files
from ...weights import lay_last, plain_weights, same_bits, set_data
from ..offers import Offer, OfferKind, Target


def channels_last(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Change]:
    """Store the weights of 2-D convolutions channels last.

    Args:
        anatomy: all its components are changed.
        settings: ``offload`` and ``decoder_device`` say which weights wait in host memory; those are reordered when
            they are copied.
        device: not read.

    Yields:
        One change, for all components.

    Raises:
        NoSiteError: the target has no 2-D convolution.
    """
    components = anatomy.components
    if not _kernels(*components.values()):
        raise NoSiteError("channels last: the model has no 2-D convolution")
    waits = settings.offload not in (None, "none")
    stay = {anatomy.autoencoder} if settings.decoder_device == "cpu" else set()
    waiting = [part for name, part in components.items() if waits and name not in stay]
    yield Change(functools.partial(_reorder, list(components.values()), waiting), hook="channels_last")


def offers(target: Target) -> Iterator[Offer]:
    """Offer channels last for models with 2-D convolutions: in 16 bits cuDNN copies maps in the plain order."""
    anatomy = target.anatomy
    if target.on_gpu and anatomy.denoiser is not None and _kernels(*anatomy.components.values()):
        yield Offer(OfferKind.ALWAYS, {"channels_last": True})


def has_sites(component: nn.Module) -> bool:
    """True if ``component`` has 2-D convolutions."""
    return bool(_kernels(component))


def reordered_weights(component: nn.Module) -> list[Tensor]:
    """Convolution weights of ``component`` that channels last stores in another order."""
    return [kernel for kernel in _kernels(component) if not kernel.is_contiguous(memory_format=torch.channels_last)]


def _kernels(*components: nn.Module) -> list[Tensor]:
    return [tensor for tensor in plain_weights(*components) if tensor.dim() == 4]


def _reorder(components: list[nn.Module], waiting: list[nn.Module]) -> Callable[[], None]:
    kernels = {id(kernel): kernel for component in components for kernel in reordered_weights(component)}
    waits = {id(kernel) for kernel in _kernels(*waiting)}
    real = active_fake_mode(*kernels.values()) is None
    with contextlib.ExitStack() as undoing:
        for kernel, mapped in zip(kernels.values(), tensors_in_files(kernels.values()), strict=True):
            in_file = mapped and real and not kernel.is_meta
            if in_file and id(kernel) in waits:
                undoing.callback(_restore_order, kernel, None)
                undoing.callback(lay_last(kernel))
            else:
                undoing.callback(_restore_order, kernel, kernel.data if in_file else None)
                set_data(kernel, kernel.data.contiguous(memory_format=torch.channels_last))
        return undoing.pop_all().close


def _restore_order(kernel: Tensor, original: Tensor | None) -> None:
    """``kernel`` in the plain order; ``original`` is what it held in a file."""
    if original is not None and kernel.device == original.device and same_bits(kernel.data, original):
        set_data(kernel, original)
    else:
        set_data(kernel, kernel.data.contiguous(memory_format=torch.contiguous_format))
