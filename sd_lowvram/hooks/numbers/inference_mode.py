"""Inference mode: no autograd bookkeeping, not even the version counters that ``no_grad`` keeps.

Nor what only a backward would need: a GEGLU's product takes the place of its GELU, which makes a UNet's largest moment
a sixth smaller. Source: diffusers' memory and speed guide; the product in place is ours. Fidelity: ``bitwise``. A call
that autograd follows, because gradients are on and an input (guidance by a picture's loss) or a weight requires them,
keeps autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.anatomy import Anatomy, geglu_of
from ...patches import Patch, wrap
from ...settings import Settings
from ...weights import needs_graph
from ..offers import Offer, OfferKind, Target
from ..replay.compiled import is_followed


def inference_mode(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run every component under ``torch.inference_mode``.

    Args:
        anatomy: all entries of its components, and its GEGLUs, are patched.
        settings: with compiled, traced or fused code the GEGLUs are left alone.
        device: not read.

    Yields:
        One patch for each entry and each GEGLU.
    """
    for name, component in anatomy.components.items():
        around = functools.partial(_run, component)
        yield from (wrap(component, entry, around, "inference_mode") for entry in anatomy.entries[name])
    if is_followed(settings) or settings.fused_kernels:
        return  # their kernels compute GELU and gate together
    for site in anatomy.feed_forwards:
        if (gate := geglu_of(site.module)) is not None:
            yield wrap(gate, "forward", functools.partial(_pass_gate, gate), "inference_mode")


def offers(target: Target) -> Iterator[Offer]:
    """Offer inference mode always."""
    yield Offer(OfferKind.ALWAYS, {"inference_mode": True})


def _run(component: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if needs_graph(component, args, kwargs):
        return original(*args, **kwargs)
    with torch.inference_mode():
        return original(*args, **kwargs)


def _pass_gate(gate: Any, original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs or needs_graph(gate, x):
        return original(x, *args, **kwargs)
    value, half = gate.proj(x).chunk(2, dim=-1)
    return F.gelu(half).mul_(value)
