"""Latents that a host (ComfyUI, a WebUI) saved before its decode.

The file holds only what a decode needs, and the texts for the pictures, because hosts do not describe their runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError
from ..files import __version__
from .file import ENDING, Saved, write_saved

if TYPE_CHECKING:
    import torch

CHOICES = ("off", "until decoded", "keep")
"""Choices for saving latents in a host: not, until they are decoded, or permanently."""

_TEXTS = {"parameters", "prompt", "workflow"}
"""Names of the texts that hosts write into their pictures."""


@dataclass(frozen=True)
class Hosted:
    """Contents of a host's file.

    Attributes:
        host: the program's name.
        latents: (N, C, h, w), unscaled, the input of an autoencoder.
        autoencoder: the checkpoint, folder or file of the autoencoder, if the host names one.
        texts: for each picture the texts of its PNG, by name.
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
    """True if ``saved`` is from a host's run, which can only be decoded."""
    return "host" in saved.about


def read_hosted(path: Path, saved: Saved) -> Hosted:
    """Contents of a file that :func:`write_hosted` wrote.

    Raises:
        BadInputError: the contents are inconsistent.
    """
    latents, texts = saved.tensors.get("latents"), saved.about.get("texts")
    host, autoencoder = saved.about.get("host"), saved.about.get("autoencoder")
    if latents is None or latents.ndim != 4 or 0 in latents.shape or not latents.is_floating_point():
        raise BadInputError(f"{path} holds no latents (pictures, channels, height, width) that can be decoded")
    if not isinstance(host, str) or not isinstance(autoencoder, str | None) or not _are_texts(texts, len(latents)):
        raise BadInputError(f"{path} does not say which pictures its latents are")
    return Hosted(host, latents, autoencoder, texts or [{}] * len(latents))


def _are_texts(texts: Any, count: int) -> bool:
    """True if ``texts`` holds texts by name, for each of ``count`` pictures or for none."""
    return (
        isinstance(texts, list)
        and len(texts) in (0, count)
        and all(isinstance(text, dict) and text.keys() <= _TEXTS for text in texts)
        and all(isinstance(text, str) for entry in texts for text in entry.values())
    )
