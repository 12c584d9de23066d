"""Pictures to train on: a folder of them, each with a text file of the same name that has a caption a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInputError
from .digests import digest_of

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_AT_ONCE = 16


@dataclass(frozen=True)
class Captioned:
    """A picture's file and its captions, the usual one first."""

    file: Path
    captions: tuple[str, ...]


def captioned_pictures(folder: Path) -> list[Captioned]:
    """The pictures of ``folder`` by name.

    Raises:
        BadInputError: not a folder, no pictures, or a picture without a caption.
    """
    if not folder.is_dir():
        raise BadInputError(f"{folder} is not a folder of pictures")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
    if not files:
        raise BadInputError(f"{folder} has no pictures ({', '.join(_SUFFIXES)})")
    return [Captioned(file, _captions(file.with_suffix(".txt"))) for file in files]


def _captions(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()  # some editors put a mark at its beginning
    except (OSError, UnicodeDecodeError):
        raise BadInputError(
            f"a picture's caption cannot be read: {file} must be a text file, a caption a line"
        ) from None
    captions = tuple(line.strip() for line in lines if line.strip())
    if not captions:
        raise BadInputError(f"{file} is empty: it must have a caption a line")
    return captions


def read_pictures(items: list[Captioned], side: int) -> Iterator[Tensor]:
    """The pictures upright, on white, the square in their middle, in batches (count, 3, side, side) of -1..1.

    Raises:
        BadInputError: a file is not a picture.
    """
    for start in range(0, len(items), _AT_ONCE):
        yield torch.stack([_read(item.file, side) for item in items[start : start + _AT_ONCE]])


def _read(file: Path, side: int) -> Tensor:
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGBA")
    except Exception as error:  # PIL raises whatever the damaged part of a file provokes
        raise BadInputError(f"{file} cannot be read as a picture: {error}") from None
    ground = Image.new("RGBA", picture.size, "white")
    ground.alpha_composite(picture)
    small = np.asarray(ImageOps.fit(ground.convert("RGB"), (side, side), Image.Resampling.LANCZOS))
    return torch.from_numpy(small.copy()).permute(2, 0, 1).float() / 127.5 - 1


@dataclass(frozen=True)
class Encoded:
    """Training data of a denoiser.

    Attributes:
        latents: (pictures, channels, H/8, W/8), scaled for the denoiser.
        texts: for each picture the embeddings of its captions (captions, tokens, width).
        empty: the embedding of an empty text (1, tokens, width).
        digest: digest of the pictures and captions, and of the models that encoded them.
    """

    latents: Tensor
    texts: list[Tensor]
    empty: Tensor
    digest: str


@torch.no_grad()
def encode_pictures(pipe: Any, items: list[Captioned], side: int) -> Encoded:
    """The pictures and captions through a pipeline's autoencoder and text encoder, on the CPU at the end."""
    scale = pipe.vae.config.scaling_factor
    models = [*pipe.vae.state_dict().values(), *pipe.text_encoder.state_dict().values()]
    latents, digests = [], [digest_of(models, *(caption for item in items for caption in ("", *item.captions)))]
    for part in read_pictures(items, side):
        batch = part.to(pipe.vae.device, pipe.vae.dtype)
        latents.append((pipe.vae.encode(batch).latent_dist.mode() * scale).float().cpu())
        digests.append(digest_of([part]))

    def embed(texts: list[str]) -> Tensor:
        embedded_text: Tensor = pipe.encode_prompt(texts, pipe.text_encoder.device, 1, False)[0]
        return embedded_text.float().cpu()

    texts = [embed([*item.captions]) for item in items]
    return Encoded(torch.cat(latents), texts, embed([""]), digest_of([], *digests))
