"""Protocols of ComfyUI's MODEL and VAE objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

Self = TypeVar("Self", bound="ModelPatcher")


class ModelPatcher(Protocol):
    """A MODEL: the model with what nodes put around it, and the device that the host loads it to.

    Attributes:
        model: the host's BaseModel around the UNet, which it has as ``diffusion_model``.
        model_options: patches of attention and blocks, and functions that take part in guidance.
        wrappers: functions around parts of a sampling, by part and by who put them there, outermost first.
    """

    model: Any
    model_options: dict[str, Any]
    wrappers: dict[str, dict[str, list[Callable[..., Any]]]]
    load_device: torch.device

    def clone(self: Self) -> Self: ...

    def get_model_object(self, name: str) -> Any: ...

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Callable[..., Any]) -> None: ...

    def remove_wrappers_with_key(self, wrapper_type: str, key: str) -> None: ...


class HostVAE(Protocol):
    """A VAE: the autoencoder with the host's own decode and encode, and what it asks memory for."""

    first_stage_model: nn.Module
    device: torch.device
    vae_dtype: torch.dtype
    patcher: ModelPatcher
    decode: Callable[..., Tensor]
    encode: Callable[..., Tensor]
    decode_tiled: Callable[..., Tensor]
    encode_tiled: Callable[..., Tensor]
    decode_tiled_: Callable[..., Tensor]
    encode_tiled_: Callable[..., Tensor]
    memory_used_decode: Callable[[Sequence[int], torch.dtype], int]
    memory_used_encode: Callable[[Sequence[int], torch.dtype], int]

    def throw_exception_if_invalid(self) -> None: ...
