"""Our attention behind ComfyUI's ``optimized_attention_override``, under an override that somebody else has set.

A call that ours does not know goes to the host's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..sd_lowvram.kernels.attention.choice import attention
from ..sd_lowvram.settings import Settings

DOOR = "optimized_attention_override"
_KNOWN = {"transformer_options", "_inside_attn_wrapper"}
_OF_THE_HOST = ("sdpa",)
"""Backends that a plan may leave to a host whose own kernel holds no score matrix either."""


def is_needed(settings: Settings, asked: Settings, fused: bool) -> bool:
    """Return True if a plan's attention differs from the host's own.

    Args:
        asked: value that the node's knobs fix, which is always used.
        fused: True if the host's kernel holds no score matrix.
    """
    if asked.attention is not None or settings.deterministic:
        return True
    return settings.attention is not None and not (fused and settings.attention in _OF_THE_HOST)


def override(
    settings: Settings,
    device: torch.device,
    note: Callable[[Hashable], None],
    theirs: Callable[..., Tensor] | None,
) -> Callable[..., Tensor]:
    """The host's override: ``settings``' attention in place of the host's kernel.

    Args:
        note: function that is called with each attention that we compute: its block, and the number of its keys.
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
    apart = (q, k, v) if skip_reshape else _split_heads(q, k, v, heads)
    mask_4d = _mask(mask)
    if kwargs.keys() - _KNOWN or apart is None or not _is_known(*apart, mask_4d):
        shape = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        return kernel(q, k, v, heads, mask=mask, attn_precision=attn_precision, **shape, **kwargs)
    options = kwargs.get("transformer_options") or {}
    note((options.get("block"), options.get("block_index"), k.shape[-2]))
    out = run(*apart, mask_4d, None, upcast=attn_precision == torch.float32)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def _split_heads(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Heads apart as the host's kernels do it: keys and values are divided among the queries' batch, also where they
    come as another (HyperTile tiles queries alone). None where that does not come out even."""
    batch, _, width = q.shape
    if any(tensor.numel() % (batch * width) for tensor in (k, v)):
        return None
    q, k, v = (tensor.reshape(batch, -1, heads, width // heads).transpose(1, 2) for tensor in (q, k, v))
    return q, k, v


def _mask(mask: Tensor | None) -> Tensor | None:
    """A mask of (queries, keys), or (batch, queries, keys), with a dimension for heads."""
    if mask is None or mask.dim() not in (2, 3):
        return mask
    return mask[None, None] if mask.dim() == 2 else mask[:, None]


def _is_known(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """True if heads and widths are equal and the mask fits the scores."""
    alike = q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[-1] == k.shape[-1] and k.shape[2] == v.shape[2]
    if mask is None or not alike:
        return alike
    scores = (*q.shape[:3], k.shape[2])
    return mask.dim() == 4 and all(size in (1, full) for size, full in zip(mask.shape, scores, strict=True))
