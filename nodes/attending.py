"""Our attention behind ComfyUI's ``optimized_attention_override``, under an override that somebody else has set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..sd_lowvram.kernels.attention.choice import attention
from ..sd_lowvram.settings import Settings

DOOR = "optimized_attention_override"


def override(
    settings: Settings,
    device: torch.device,
    note: Callable[[Hashable], None],
    theirs: Callable[..., Tensor] | None,
) -> Callable[..., Tensor]:
    """The host's override: ``settings``' attention in place of the host's kernel.

    Args:
        note: told at every call that we compute which attention it is: its block, and how many keys it has.
        theirs: an override that is there already. It stays the outer one and gets ours for the host's kernel.

    Raises:
        SettingsError: the backend cannot run on ``device``, or has not proved deterministic there.
    """
    ours = functools.partial(_attend, attention(settings, device), note)
    if theirs is None:
        return ours
    return lambda kernel, *args, **kwargs: theirs(functools.partial(ours, kernel), *args, **kwargs)


def _attend(
    run: Callable[..., Tensor],
    note: Callable[[Hashable], None],
    kernel: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """The host's signature: (batch, tokens, heads * width), or (batch, heads, tokens, width) with ``skip_reshape``."""
    options = kwargs.get("transformer_options") or {}
    note((options.get("block"), options.get("block_index"), k.shape[-2]))
    if not skip_reshape:
        q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v))
    if mask is not None and mask.dim() < 4:  # (queries, keys), or (batch, queries, keys)
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
    out = run(q, k, v, mask, None, upcast=attn_precision == torch.float32)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
