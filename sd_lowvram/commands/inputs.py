"""Checks of what was typed, before anything heavy is imported or loaded."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..checkpoints.schedulers import find_scheduler
from ..errors import BadInputError
from ..settings import Settings
from ..units import parse_size

if TYPE_CHECKING:
    from PIL.Image import Image

Task = Literal["txt2img", "img2img", "inpaint"]
LARGEST_SEED = 2**64 - 1
LARGEST_SIDE = 1 << 16


@dataclass(frozen=True)
class Job:
    """What was asked for on the command line; None where the model, the plan or chance decides. Sides in pixels."""

    prompt: str
    negative: str
    model: str | None
    output: Path | None
    width: int | None
    height: int | None
    steps: int
    seed: int | None
    guidance: float | None
    scheduler: str | None
    batch: int
    init_image: Path | None
    strength: float | None
    mask: Path | None
    prediction: str | None
    vram: str | None
    ram: str | None
    approximate: bool
    device: str | None
    allow_pickle: bool
    settings: Settings
    memory_plot: Path | None = None

    @property
    def task(self) -> Task:
        return "inpaint" if self.mask else "img2img" if self.init_image else "txt2img"

    @property
    def steps_run(self) -> int:
        """Steps that are computed: a picture that is changed by half starts in the middle."""
        return self.steps if self.strength is None else min(int(self.steps * self.strength), self.steps)


def check_job(job: Job) -> Job:
    """``job`` with a seed, a strength if it starts from a picture, and the scheduler's usual name.

    Raises:
        BadInputError: a value that cannot be used; the message says what to change.
    """
    check_side("width", job.width)
    check_side("height", job.height)
    for name, size in (("vram", job.vram), ("ram", job.ram)):
        if size is not None:
            parse_size(size, f"--{name}")
    for name, count in (("steps", job.steps), ("batch", job.batch)):
        if count < 1:
            raise BadInputError(f"--{name} {count} must be at least 1")
    if job.guidance is not None and not 0 <= job.guidance < 1000:
        raise BadInputError(f"--guidance {job.guidance:g} must be from 0 to 1000; 7.5 is usual, 1 turns it off")
    if job.seed is not None and not -1 <= job.seed <= LARGEST_SEED:
        raise BadInputError(f"--seed {job.seed} must be from 0 to {LARGEST_SEED} (-1 for a random one)")
    return dataclasses.replace(
        job,
        seed=secrets.randbelow(2**32) if job.seed in (None, -1) else job.seed,
        scheduler=find_scheduler(job.scheduler) if job.scheduler is not None else None,
        strength=_checked_strength(job),
    )


def _checked_strength(job: Job) -> float | None:
    if job.init_image is None:
        if job.mask is not None:
            raise BadInputError(f"--mask {job.mask} needs --init-image, the picture of which a part is painted anew")
        if job.strength is not None:
            raise BadInputError(f"--strength {job.strength:g} needs --init-image, the picture that is changed so much")
        return None
    strength = job.strength if job.strength is not None else 1.0 if job.mask is not None else 0.75
    if not 0 < strength <= 1:
        raise BadInputError(f"--strength {strength:g} must be above 0 and at most 1 (1: the picture is painted over)")
    if int(job.steps * strength) < 1:
        raise BadInputError(f"--strength {strength:g} of {job.steps} steps is less than one step: raise either")
    return strength


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


def check_device(name: str) -> str:
    """Raise BadInputError unless torch can compute on ``name``."""
    import torch

    try:
        torch.zeros(1, device=name).item()  # asked back: meta makes tensors, but without numbers
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
