"""The plain decode and encode with a check of the result: NaN or infinity would give a black picture.

A failed result is computed again by exact strips, in float32 where float16 overflows. Strips hold less than the plain
layers, so they need no plan of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...compat.private import FakeTensor
from ...errors import NotFiniteError
from ...models.anatomy import Anatomy
from ...models.autoencoder import dissect
from ...patches import Patch, wrap
from ...settings import Settings
from ..offers import Offer, OfferKind, Target
from .overflow import is_finite
from .vae_exact import divides, run_exact


def vae_whole(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Check the results of decoder and encoder for NaN and infinity, if the target has an autoencoder. Synchronises
    once.

    Args:
        anatomy: its autoencoder is patched.
        settings: with these, a result that is not finite is computed again by strips.
        device: not read.

    Yields:
        One patch of ``forward`` for the decoder and one for the encoder.
    """
    vae: Any = anatomy.vae
    for name, stage in (("decoder", "decode"), ("encoder", "encode")) if vae is not None else ():
        around = functools.partial(_check_result, vae, dataclasses.replace(settings, vae_map=None), stage)
        yield wrap(getattr(vae, name), "forward", around, "vae_whole")


def offers(target: Target) -> Iterator[Offer]:
    """Offer the plain decode, which is the least only if the autoencoder cannot run by strips."""
    if target.anatomy.vae is not None:
        tiled = divides(target.anatomy.vae)
        yield Offer(OfferKind.INSTEAD, {"vae_tiles": "off"}, stages=("encode", "decode"), least=not tiled)


def _check_result(
    vae: Any, settings: Settings, stage: str, original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    result = original(x, *args, **kwargs)
    learns = torch.is_grad_enabled() and x.requires_grad
    if learns or isinstance(x, FakeTensor) or is_finite(result):
        return result
    del result
    steps = dissect(vae)  # at each call, as a LoRA may have been loaded since
    if steps is None:
        raise NotFiniteError(
            f"{stage}: the output of {type(vae).__name__} for {tuple(x.shape)} in {x.dtype} has NaN or infinity"
            ": load it in float32 or bfloat16 (--precision fp32 or bf16)"
        )
    return run_exact(steps.decoder if stage == "decode" else steps.encoder, x, settings, stage)
