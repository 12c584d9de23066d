"""Checks of what was typed, before anything heavy is imported or loaded."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.inspection import PREDICTIONS, Task
from ..checkpoints.schedulers import find_scheduler
from ..errors import BadInputError
from ..settings import Settings
from .values import (
    MOST_PICTURES,
    MOST_STEPS,
    check_budgets,
    check_count,
    check_device_name,
    check_given,
    check_side,
    check_text,
)

LARGEST_SEED = 2**64 - 1
DEMO_GUIDANCE, USUAL_GUIDANCE = 4.0, 7.5


@dataclass(frozen=True)
class Job:
    """What was asked for on the command line; None where the model, the plan or chance decides. Sides in pixels."""

    prompt: str
    negative: str
    model: str | None
    output: str | None
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
    check_text("the prompt", job.prompt)
    check_text("--negative", job.negative)
    check_text("--model", job.model or "")  # weights are opened by a library that takes nothing else
    check_given(model=job.model, device=job.device, scheduler=job.scheduler)
    check_side("width", job.width)
    check_side("height", job.height)
    check_budgets(job.vram, job.ram)
    check_count("--steps", job.steps, MOST_STEPS)
    check_count("--batch", job.batch, MOST_PICTURES)
    check_device_name(job.device)
    if job.prediction not in (None, *PREDICTIONS):
        raise BadInputError(f"--prediction {job.prediction!r} is unknown: choose {' or '.join(PREDICTIONS)}")
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
