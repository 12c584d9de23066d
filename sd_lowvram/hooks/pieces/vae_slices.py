"""Slices: decoder and encoder run one picture of the batch at a time.

Source: VAE slicing in diffusers. Fidelity: ``rounding`` (kernels may be chosen by batch size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import NoSiteError
from ...models.anatomy import Anatomy
from ...models.causal_autoencoder import is_hosted, sees_frames
from ...patches import Patch, replace, wrap
from ...settings import Settings
from ...weights import place_part
from ..offers import Offer, OfferKind, Target


def vae_slices(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Decode and encode picture by picture.

    Args:
        anatomy: its autoencoder is patched.
        settings, device: not read.

    Yields:
        Patches of decoder and encoder; for an autoencoder of frames its own slicing, or patches of decode and encode.

    Raises:
        NoSiteError: the target has no autoencoder.
    """
    vae: Any = anatomy.vae
    if vae is None:
        raise NoSiteError("VAE slices: the target has no autoencoder")
    if sees_frames(vae):  # between its parts it carries frames from call to call
        if not is_hosted(vae):
            yield replace(vae, "use_slicing", True, "vae_slices")
            return
        yield from (wrap(vae, entry, _run_single, "vae_slices") for entry in ("decode", "encode"))
        return
    for part in (vae.decoder, vae.encoder):
        yield wrap(part, "forward", _run_single, "vae_slices")


def offers(target: Target) -> Iterator[Offer]:
    """Offer one picture at a time, if the batch has several."""
    if target.batch > 1 and target.anatomy.vae is not None:
        yield Offer(OfferKind.ALWAYS, {"vae_slices": True})


def _run_single(original: Callable[..., Tensor], batch: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if len(batch) == 1:
        return original(batch, *args, **kwargs)
    together: Tensor | None = None
    for number in range(len(batch)):
        together = place_part(together, original(batch[number : number + 1], *args, **kwargs), 0, number, len(batch))
    assert together is not None
    return together
