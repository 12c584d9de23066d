"""Checks of what was typed, before anything heavy is imported or loaded."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import BadInputError
from ..schedulers import find_scheduler
from ..sizes import parse_size

if TYPE_CHECKING:
    from PIL.Image import Image

Task = Literal["txt2img", "img2img", "inpaint"]
LARGEST_SEED = 2**64 - 1
LARGEST_SIDE = 1 << 16


@dataclass(frozen=True)
class Job:
    """What to make: a checked picture of the command line. Sizes in pixels, None where the model decides."""

    prompt: str
    negative: str
    width: int | None
    height: int | None
    steps: int
    seed: int
    guidance: float | None
    scheduler: str | None
    batch: int
    init_image: Path | None
    mask: Path | None
    strength: float

    @property
    def task(self) -> Task:
        return "inpaint" if self.mask else "img2img" if self.init_image else "txt2img"

    @property
    def steps_run(self) -> int:
        """Steps that are computed: a picture that is changed by half starts in the middle."""
        return min(int(self.steps * self.strength), self.steps) if self.init_image else self.steps


def check_job(
    prompt: str,
    negative: str,
    width: int | None,
    height: int | None,
    steps: int,
    seed: int | None,
    guidance: float | None,
    scheduler: str | None,
    batch: int,
    init_image: Path | None,
    mask: Path | None,
    strength: float | None,
) -> Job:
    """A job with a seed, or a BadInputError that says what to change."""
    check_side("width", width)
    check_side("height", height)
    _at_least("steps", steps, 1)
    _at_least("batch", batch, 1)
    if guidance is not None and not 0 <= guidance < 1000:
        raise BadInputError(f"--guidance {guidance:g} must be from 0 to 1000; 7.5 is usual, 1 turns it off")
    if seed is not None and not -1 <= seed <= LARGEST_SEED:
        raise BadInputError(f"--seed {seed} must be from 0 to {LARGEST_SEED} (-1 for a random one)")
    chosen = find_scheduler(scheduler) if scheduler is not None else None
    if init_image is None and mask is not None:
        raise BadInputError(f"--mask {mask} needs --init-image, the picture of which a part is painted anew")
    if init_image is None and strength is not None:
        raise BadInputError(f"--strength {strength:g} needs --init-image, the picture that is changed so much")
    strength = strength if strength is not None else 1.0 if mask is not None else 0.75
    if not 0 < strength <= 1:
        raise BadInputError(f"--strength {strength:g} must be above 0 and at most 1 (1: the picture is painted over)")
    drawn = secrets.randbelow(2**32) if seed is None or seed == -1 else seed
    job = Job(
        prompt, negative, width, height, steps, drawn, guidance, chosen, batch, init_image, mask, strength
    )  # fmt: skip
    if job.steps_run < 1:
        raise BadInputError(f"--strength {strength:g} of {steps} steps is less than one step: raise either")
    return job


def check_side(name: str, value: int | None) -> None:
    """Raise BadInputError unless ``value`` pixels are a side that Stable Diffusion makes: a positive multiple of 8."""
    if value is None or (value > 0 and value % 8 == 0 and value <= LARGEST_SIDE):
        return
    if value <= 0:
        raise BadInputError(f"--{name} {value} must be a positive multiple of 8: 512, for example")
    if value > LARGEST_SIDE:
        raise BadInputError(f"--{name} {value} is more than {LARGEST_SIDE} pixels")
    below, above = value - value % 8, value - value % 8 + 8
    near = f"{below} and {above} are nearest" if below else f"{above} is nearest"
    raise BadInputError(f"--{name} {value} is not divisible by 8: {near}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise BadInputError(f"--{name} {value} must be at least {least}")


def check_budget(name: str, value: str | None) -> int | None:
    """Bytes in a budget as typed, None where none was given."""
    return None if value is None else parse_size(value, f"--{name}")


def check_device(name: str | None) -> str | None:
    """Raise BadInputError unless torch can compute on ``name``."""
    if name is None:
        return None
    import torch

    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise BadInputError(f"--device {name!r} cannot be used ({reason}): cpu always can") from error
    return name


def open_picture(path: Path, option: str, mode: str = "RGB") -> Image:
    """The picture in ``path``, upright.

    Raises:
        BadInputError: missing, or no picture.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            return ImageOps.exif_transpose(file).convert(mode)
    except Exception as error:  # PIL raises whatever the damaged part of a file provokes
        reason = getattr(error, "strerror", None) or "it is no picture that can be read"
        raise BadInputError(f"{option} {path} cannot be opened: {reason}") from error
