"""Latents of a run in another program, kept before they are decoded.

A host does not tell what its run consists of, so such a file holds no more than a decode needs, and the texts that the
pictures are to carry.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError
from ..files.version import __version__
from .file import ENDING, Saved, write_saved

if TYPE_CHECKING:
    import torch

CHOICES = ("off", "until decoded", "keep")
"""Whether a host saves latents first, and how long they stay."""

_TEXTS = {"parameters", "prompt", "workflow"}
"""What the hosts put into their pictures, by name."""


@dataclass(frozen=True)
class Hosted:
    """What such a file holds.

    Attributes:
        host: the program's name.
        latents: (N, C, h, w), unscaled, as an autoencoder takes them.
        autoencoder: the checkpoint, folder or file that has it, if the host told.
        texts: for each picture what goes into its PNG, by name.
    """

    host: str
    latents: torch.Tensor
    autoencoder: str | None = None
    texts: Sequence[dict[str, str]] = ()


def new_place(folder: Path) -> Path:
    """A name for such a file in ``folder`` that no other one has."""
    stem = time.strftime("sd-lowvram-%Y%m%d-%H%M%S")
    names = (f"{stem}-{number}{ENDING}" for number in range(1, 1 << 20))
    return next(place for name in names if not (place := folder / name).exists())


def write_hosted(hosted: Hosted, path: Path) -> None:
    """Write ``hosted`` as :func:`write_saved` does.

    Raises:
        OSError: it cannot be written.
    """
    about = {"version": __version__, "host": hosted.host, "autoencoder": hosted.autoencoder}
    latents = hosted.latents.detach().to("cpu", copy=True).contiguous()
    write_saved(Saved({**about, "texts": list(hosted.texts)}, {"latents": latents}), path)


def is_hosted(saved: Saved) -> bool:
    """Whether ``saved`` is of a host's run, of which nothing but the decode can be made."""
    return "host" in saved.about


def hosted_of(path: Path, saved: Saved) -> Hosted:
    """What :func:`write_hosted` has written to ``path``.

    Raises:
        BadInputError: it makes no sense.
    """
    latents, texts = saved.tensors.get("latents"), saved.about.get("texts")
    host, autoencoder = saved.about.get("host"), saved.about.get("autoencoder")
    if latents is None or latents.ndim != 4 or 0 in latents.shape or not latents.is_floating_point():
        raise BadInputError(f"{path} holds no latents (pictures, channels, height, width) that can be decoded")
    if not isinstance(host, str) or not isinstance(autoencoder, str | None) or not _are_texts(texts, len(latents)):
        raise BadInputError(f"{path} does not tell which pictures its latents are")
    return Hosted(host, latents, autoencoder, texts or [{}] * len(latents))


def _are_texts(given: Any, count: int) -> bool:
    """Whether they are texts by name, for each of ``count`` pictures or for none."""
    return (
        isinstance(given, list)
        and len(given) in (0, count)
        and all(isinstance(one, dict) and one.keys() <= _TEXTS for one in given)
        and all(isinstance(text, str) for one in given for text in one.values())
    )
