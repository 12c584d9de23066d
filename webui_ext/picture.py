"""Sizes and counts of a generation, as the host derives them from the request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from modules import shared

from . import host

_FACTOR = 8
"""Pixels to a side of a latent pixel, in every model that a WebUI runs with a UNet."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation: pixels, pictures at a time, steps, rows of the denoiser's batch for each picture, encoding, and
    frames of the latents.

    Sides are multiples of 8, see :func:`side`.
    """

    width: int
    height: int
    batch: int
    steps: int
    passes: int = 2
    encodes: bool = False
    frames: int = 1

    def of_latents(self, shape: Sequence[int], factor: int, passes: int, steps: int | None) -> Generation:
        """Return this generation with the sizes of latents that come.

        Args:
            shape: (N, C, h, w) or (N, C, frames, h, w).
            factor: pixels to a side of a latent pixel.
            passes, steps: of the pass that comes; None: the steps stay.
        """
        width, height = factor * shape[-1], factor * shape[-2]
        made = dataclasses.replace(self, width=width, height=height, batch=shape[0], passes=passes)
        return dataclasses.replace(made, steps=steps or self.steps, frames=shape[2] if len(shape) == 5 else 1)

    @property
    def load(self) -> int:
        """Pixels of all rows of the denoiser's batch."""
        return self.width * self.height * self.batch * self.passes * self.frames


def side(pixels: float, encodes: bool = False) -> int:
    """The side to plan for where the host is asked for ``pixels``: its latents are an eighth of them, rounded down;
    a picture that it starts from it encodes as it is, so that is planned for the next multiple of 8."""
    whole = int(pixels)
    return max(_FACTOR, _FACTOR * (-(-whole // _FACTOR) if encodes else whole // _FACTOR))


def steps_run(steps: int, strength: float | None) -> int:
    """The steps that the host runs of ``steps`` where it starts from a picture, by its denoising strength: those of the
    rest of the schedule, unless its own setting asks for all. DDIM, PLMS and UniPC run one less."""
    if strength is None or getattr(shared.opts, "img2img_fix_steps", False):
        return steps
    return min(steps, int(min(strength, 0.999) * steps) + 1)


def requested_picture(p: Any, model: Any) -> Generation:
    """The picture of the generation ``p``; of its first pass, where a hires fix follows."""
    encodes = hasattr(p, "init_images")
    return Generation(
        width=side(p.width, encodes),
        height=side(p.height, encodes),
        batch=p.batch_size,
        steps=steps_run(p.steps, getattr(p, "denoising_strength", None)) if encodes else p.steps,
        passes=passes_of(p, model),
        encodes=encodes or bool(getattr(p, "enable_hr", False)) or host.encodes_always(model),
    )


def passes_of(p: Any, model: Any) -> int:
    """Rows of the denoiser's batch for each picture, in the pass that ``p`` is in."""
    hires = bool(getattr(p, "is_hr_pass", False))
    scale = getattr(p, "hr_cfg", None) if hires else None
    prompts = getattr(p, "all_hr_prompts" if hires else "all_prompts", None) or getattr(p, "all_prompts", None)
    return host.passes(
        model, p.cfg_scale if scale is None else scale, tuple(prompts or ()), getattr(p, "image_cfg_scale", None)
    )
