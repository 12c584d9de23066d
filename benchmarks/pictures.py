"""Common parts of measurements of whole pictures: the pipeline, a picture by its seed, and the ways to run it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import __version__
from sd_lowvram.api import plan
from sd_lowvram.checkpoints.architectures import NAMES
from sd_lowvram.checkpoints.load import load_pipeline
from sd_lowvram.devices.info import default_device, dtype_on
from sd_lowvram.devices.pairs import PairedTimes, in_turn
from sd_lowvram.errors import BadInputError, BudgetError
from sd_lowvram.planning.as_others import Way, way_of
from sd_lowvram.policies.named import check_policy, runs_on

PROMPT = "a red apple"


def loaded(model: str | None) -> Any:
    """The pipeline of a model on disk, or of the demo model, in the type in which measurements compute here.

    Raises:
        BadInputError: an architecture's name, which has no weights.
    """
    if model in NAMES:
        raise BadInputError(f"{model} has no weights to measure with: give a model's folder or file, or --gpu")
    pipe: Any = load_pipeline(model, dtype=dtype_on(default_device()))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: Any, width: int, height: int, steps: int, *, prompt: str = PROMPT, seed: int = 1) -> Tensor:
    """A picture (3, H, W) in [0, 1], on the CPU."""
    noise = torch.Generator().manual_seed(seed)
    given = {"width": width, "height": height, "num_inference_steps": steps, "output_type": "pt"}
    drawn: Tensor = pipe(prompt, generator=noise, **given).images[0]
    return drawn.float().cpu()


def least_budget(pipe: Any, **asked: Any) -> int:
    """The least bytes of a device with which a plan of what is ``asked`` is made, which was traced whole; a plan tells
    its ``minimum_vram_bytes`` as traced in parts."""
    try:
        return plan(pipe, vram="1 B", **asked).minimum_vram_bytes
    except BudgetError as refusal:
        return refusal.needed_bytes


def timed_pictures(pipe: Any, width: int, height: int, steps: int, runs: int) -> PairedTimes:
    """Seconds of so many pictures, each until it is in host memory; one more goes before."""
    return in_turn([functools.partial(picture, pipe, width, height, steps)], runs, default_device())


def chosen_policies(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The policies to measure here, and those that are left out as they need an accelerator.

    Args:
        names: asked for; empty: all.

    Raises:
        SettingsError: a name that is none. BadInputError: one is asked for that does not run here.
    """
    device = default_device().type
    for name in names:
        check_policy(name, device)
    runs, left_out = runs_on(device)
    return (tuple(names), ()) if names else (runs, left_out)


def ways(names: Sequence[str], model: str | None, pipe: Any, width: int, height: int, steps: int) -> dict[str, Way]:
    """The way of each policy to run ``pipe``, planned for pictures of this size with all that is free."""
    device = default_device()
    planned = functools.partial(plan, pipe, width=width, height=height, steps=steps, device=device)
    return {name: way_of(name, pipe, device, planned, lambda: loaded(model)) for name in names}


def facts(model: str | None, **asked: Any) -> dict[str, Any]:
    """Head of a report: versions, the kind of machine, and the request."""
    device = default_device()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}"
    versions = {"sd_lowvram": __version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"device": card, "threads": torch.get_num_threads(), "model": name_of(model), "seed": 1}
    return {**versions, **about, **asked}


def name_of(model: str | None) -> str:
    """A model as it is named in files: never by its path."""
    from pathlib import Path

    return "demo" if model is None else Path(model).stem
