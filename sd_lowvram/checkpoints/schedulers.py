"""The schedulers by the names that people use, and those that AUTOMATIC1111 writes into a picture's parameters."""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadInputError


@dataclass(frozen=True)
class Scheduler:
    """A diffusers class with its options; ``label`` and ``schedule`` are the WebUI's words for it."""

    kind: str
    label: str
    schedule: str = ""
    options: dict[str, Any] = field(default_factory=dict)


# What belongs to the model and not to the way of sampling it.
_FACTS = {"num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type"}
_FACTS |= {"steps_offset", "timestep_spacing", "set_alpha_to_one", "rescale_betas_zero_snr"}

_KARRAS = {"use_karras_sigmas": True}
# Latents pass 1, where these clip by default: pixels do not.
_LATENT = {"clip_sample": False}
_SDE = {"algorithm_type": "sde-dpmsolver++"}

SCHEDULERS = {
    "euler": Scheduler("EulerDiscreteScheduler", "Euler"),
    "euler-karras": Scheduler("EulerDiscreteScheduler", "Euler", "Karras", _KARRAS),
    "euler-a": Scheduler("EulerAncestralDiscreteScheduler", "Euler a"),
    "dpm++-2m": Scheduler("DPMSolverMultistepScheduler", "DPM++ 2M"),
    "dpm++-2m-karras": Scheduler("DPMSolverMultistepScheduler", "DPM++ 2M", "Karras", _KARRAS),
    "dpm++-2m-sde": Scheduler("DPMSolverMultistepScheduler", "DPM++ 2M SDE", "", _SDE),
    "dpm++-2m-sde-karras": Scheduler("DPMSolverMultistepScheduler", "DPM++ 2M SDE", "Karras", {**_SDE, **_KARRAS}),
    "ddim": Scheduler("DDIMScheduler", "DDIM", "", {**_LATENT, "set_alpha_to_one": False}),
    "ddpm": Scheduler("DDPMScheduler", "DDPM", "", _LATENT),
    "plms": Scheduler("PNDMScheduler", "PLMS", "", {"skip_prk_steps": True}),
    "unipc": Scheduler("UniPCMultistepScheduler", "UniPC"),
    "heun": Scheduler("HeunDiscreteScheduler", "Heun"),
    "dpm2": Scheduler("KDPM2DiscreteScheduler", "DPM2"),
    "dpm2-a": Scheduler("KDPM2AncestralDiscreteScheduler", "DPM2 a"),
    "deis": Scheduler("DEISMultistepScheduler", "DEIS"),
    "lcm": Scheduler("LCMScheduler", "LCM", "", _LATENT),
}


def find_scheduler(name: str) -> str:
    """The key of ``SCHEDULERS`` that ``name`` means; "Euler a", "euler_a" and "EulerAncestralDiscreteScheduler" do too.

    Raises:
        BadInputError: no such scheduler; the message has the nearest name and all of them.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    classes = {scheduler.kind.lower(): key for key, scheduler in reversed(SCHEDULERS.items())}
    key = plain if plain in SCHEDULERS else classes.get(plain.replace("-", ""))
    if key is not None:
        return key
    near = difflib.get_close_matches(plain, SCHEDULERS, 1, cutoff=0.5)
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise BadInputError(f"unknown scheduler {name!r}{guess}: choose one of {', '.join(SCHEDULERS)}")


def set_scheduler(pipe: Any, name: str) -> None:
    """Replace the scheduler of ``pipe``; noise schedule and prediction type stay.

    Args:
        pipe: a pipeline.
        name: such as "euler" or "heun".
    """
    import diffusers

    chosen = SCHEDULERS[find_scheduler(name)]
    kind = getattr(diffusers, chosen.kind)
    config = pipe.scheduler.config
    # What the old scheduler left at its own default says nothing about the model.
    facts = _FACTS & set(inspect.signature(kind).parameters) - set(config.get("_use_default_values", ()))
    pipe.scheduler = kind(**{fact: config[fact] for fact in facts if fact in config} | chosen.options)


def label_of(scheduler: Any) -> tuple[str, str]:
    """The WebUI's words for a scheduler object: sampler ("Euler a"), and schedule type ("Karras" or "")."""
    kind, config = type(scheduler).__name__, scheduler.config
    karras = "Karras" if config.get("use_karras_sigmas") else ""
    sde = " SDE" if kind == "DPMSolverMultistepScheduler" and "sde" in config.get("algorithm_type", "") else ""
    for served in SCHEDULERS.values():
        if served.kind == kind:
            return served.label + sde, karras
    return kind.removesuffix("Scheduler"), karras
