"""Channels-last memory format of the convolutions' weights; activations follow it by themselves.

Source: diffusers' memory and speed guide. Fidelity: ``rounding`` (other convolution kernels).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import NoSiteError
from ..models.anatomy import Anatomy
from ..patches import Change
from ..settings import Settings
from ..weights import all_tensors, set_data


def channels_last(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Change]:
    """Store the weights of 2-D convolutions channels last.

    Raises:
        NoSiteError: the target has no 2-D convolution.
    """
    kernels = [tensor for tensor in all_tensors(*anatomy.components.values()) if tensor.dim() == 4]
    if not kernels:
        raise NoSiteError("channels last: the model has no 2-D convolution")
    yield Change(functools.partial(_reorder, kernels), hook="channels_last")


def _reorder(kernels: list[Tensor]) -> Callable[[], None]:
    changed = [kernel for kernel in kernels if not kernel.is_contiguous(memory_format=torch.channels_last)]
    for kernel in changed:
        set_data(kernel, kernel.data.contiguous(memory_format=torch.channels_last))

    def undo() -> None:
        for kernel in changed:
            set_data(kernel, kernel.data.contiguous(memory_format=torch.contiguous_format))

    return undo
