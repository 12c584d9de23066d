"""One picture of the batch at a time through decoder and encoder.

Source: VAE slicing in diffusers. Fidelity: ``rounding`` (kernels may be chosen by batch size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import NoSiteError
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings


def vae_slices(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Decode and encode picture by picture.

    Raises:
        NoSiteError: the target has no autoencoder.
    """
    vae: Any = anatomy.vae
    if vae is None:
        raise NoSiteError("VAE slices: the target has no autoencoder")
    for part in (vae.decoder, vae.encoder):
        yield wrap(part, "forward", _one_by_one, "vae_slices")


def _one_by_one(original: Callable[..., Tensor], batch: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result = original(batch[:1], *args, **kwargs)
    if len(batch) == 1:
        return result
    together = result.new_empty((len(batch), *result.shape[1:]))
    together[:1] = result
    for number in range(1, len(batch)):
        together[number : number + 1] = original(batch[number : number + 1], *args, **kwargs)
    return together
