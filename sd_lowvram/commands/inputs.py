"""Checks of what was typed, before anything heavy is imported or loaded."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoints.inspection import PREDICTIONS, Task
from ..checkpoints.schedulers import SCHEDULERS, find_scheduler
from ..devices.support import check_device_name
from ..errors import BadInputError
from ..policies import HELP
from ..settings import Settings
from .values import MOST_STEPS, check_given, check_run, check_text

LARGEST_SEED = 2**64 - 1
DEMO_GUIDANCE, USUAL_GUIDANCE = 4.0, 7.5
PICTURE, MEMORY, RUN = "Picture", "Memory", "Run"
_NAMES = ", ".join(SCHEDULERS)
RAM = "RAM that sd-lowvram may use, in addition to the system and other programs; left out: what is free."


def option(*names: str, text: str, panel: str, metavar: str | None = None, rare: bool = False) -> Any:
    """An option of the command line under one of its headings; ``rare`` ones are shown by --help-all alone."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, hidden=rare)


@dataclass(frozen=True)
class Job:
    """Request of the command line; None if the model, the plan or chance decides. Sides are in pixels."""

    # fmt: off
    prompt: Annotated[str, typer.Argument(help="What the picture shows.", metavar="PROMPT", show_default=False)] = ""
    model: Annotated[
        str | None,
        option("--model", "-m", text="Diffusers folder, or .safetensors file of SD1.x, SD2.x or SDXL; left out: the "
               "demo model. For ComfyUI's split files see --transformer in --help-all.", panel=PICTURE, metavar="PATH"),
    ] = None
    transformer: Annotated[
        Path | None,
        option("--transformer", text="In place of --model: ComfyUI's file of a transformer (.safetensors or .gguf), "
               "together with --text-encoder, --vae and --tokenizer.", panel=PICTURE, rare=True, metavar="FILE"),
    ] = None
    text_encoder: Annotated[
        list[Path] | None,
        option("--text-encoder", text="File of a text encoder of --transformer; once for each.", panel=PICTURE,
               rare=True, metavar="FILE"),
    ] = None
    vae: Annotated[
        Path | None, option("--vae", text="File of the VAE of --transformer.", panel=PICTURE, rare=True, metavar="FILE")
    ] = None
    tokenizer: Annotated[
        Path | None,
        option("--tokenizer", text="Folder of the tokenizer of --transformer (T5's or Qwen's), which its files lack.",
               panel=PICTURE, rare=True, metavar="FOLDER"),
    ] = None
    output: Annotated[
        str | None,
        option("--output", "-o", text="PNG file (overwritten if there) or folder; left out: a new name in outputs/.",
                panel=PICTURE, metavar="PATH"),
    ] = None
    negative: Annotated[str, option("--negative", text="What the picture does not show.", panel=PICTURE)] = ""
    width: Annotated[
        int | None, option("--width", text="Width in pixels; left out: the model's own.", panel=PICTURE)
    ] = None
    height: Annotated[
        int | None, option("--height", text="Height in pixels; left out: the model's own.", panel=PICTURE)
    ] = None
    steps: Annotated[int, option("--steps", text=f"Denoising steps, up to {MOST_STEPS}.", panel=PICTURE)] = 30
    seed: Annotated[
        int | None,
        option("--seed", text="The same seed gives the same picture; each further picture of a batch adds 1. "
               "Left out: random.", panel=PICTURE),
    ] = None
    guidance: Annotated[
        float | None,
        option("--guidance", text=f"How closely to follow the prompt; left out: {USUAL_GUIDANCE} (demo model: "
                f"{DEMO_GUIDANCE}; FLUX, SD3 and the like: the model's own).", panel=PICTURE),
    ] = None
    scheduler: Annotated[
        str | None,
        option("--scheduler", text=f"Sampler; left out: the model's own. One of {_NAMES}.", panel=PICTURE, rare=True,
               metavar="NAME"),
    ] = None
    batch: Annotated[int, option("--batch", text="Pictures made at the same time.", panel=PICTURE, rare=True)] = 1
    init_image: Annotated[
        Path | None,
        option("--init-image", text="Picture to start from, in its own size unless --width or --height is given.",
                panel=PICTURE, metavar="FILE"),
    ] = None
    strength: Annotated[
        float | None,
        option("--strength", text="How much of --init-image changes, up to 1; left out: 0.75, with --mask 1.",
               panel=PICTURE),
    ] = None
    mask: Annotated[
        Path | None,
        option("--mask", text="Paint only where this picture is white.", panel=PICTURE, rare=True, metavar="FILE"),
    ] = None
    prediction: Annotated[
        str | None,
        option("--prediction", text="What a single file of SD2.x predicts: epsilon or v_prediction; left out: "
               "guessed from its weights.", panel=PICTURE, rare=True),
    ] = None
    vram: Annotated[
        str | None,
        option("--vram", text='VRAM that sd-lowvram may use, such as "4GB"; left out: what is free.', panel=MEMORY,
               metavar="SIZE"),
    ] = None
    ram: Annotated[
        str | None,
        option("--ram", text=RAM, panel=MEMORY, rare=True, metavar="SIZE"),
    ] = None
    approximate: Annotated[
        bool, option("--approximate", text="Allow settings that change the picture.", panel=MEMORY)
    ] = False
    policy: Annotated[
        str | None, option("--policy", text=HELP, panel=MEMORY, rare=True, metavar="NAME")
    ] = None
    memory_plot: Annotated[
        Path | None,
        option("--memory-plot", text="Draw the memory of each stage, planned and measured, into this PNG file; slows "
               "small models on a CPU a little.", panel=MEMORY, rare=True, metavar="FILE"),
    ] = None
    device: Annotated[
        str | None,
        option("--device", text="cuda, cuda:1, cpu, ...; left out: a GPU if there is one.", panel=RUN, rare=True),
    ] = None
    allow_pickle: Annotated[
        bool, option("--allow-pickle", text="Load a .ckpt whose source you trust.", panel=RUN, rare=True)
    ] = False
    # fmt: on
    settings: Settings = dataclasses.field(default_factory=Settings)

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
    check_given(model=job.model, device=job.device, scheduler=job.scheduler, policy=job.policy)
    model = split_or(
        job.model,
        transformer=job.transformer,
        text_encoder=job.text_encoder,
        vae=job.vae,
        tokenizer=job.tokenizer,
    )
    check_run(job.width, job.height, job.steps, job.batch, job.vram, job.ram)
    if job.device is not None:
        check_device_name(job.device, "--device")
    if job.prediction not in (None, *PREDICTIONS):
        raise BadInputError(f"--prediction {job.prediction!r} is unknown: choose {' or '.join(PREDICTIONS)}")
    if job.guidance is not None and not 0 <= job.guidance < 1000:
        raise BadInputError(f"--guidance {job.guidance:g} must be from 0 to 1000; 7.5 is usual, 1 turns it off")
    if job.seed is not None and not -1 <= job.seed <= LARGEST_SEED:
        raise BadInputError(f"--seed {job.seed} must be from 0 to {LARGEST_SEED} (-1 for a random one)")
    return dataclasses.replace(
        job,
        model=model,
        transformer=None,
        text_encoder=None,
        vae=None,
        tokenizer=None,
        seed=secrets.randbelow(2**32) if job.seed in (None, -1) else job.seed,
        scheduler=find_scheduler(job.scheduler) if job.scheduler is not None else None,
        strength=_checked_strength(job),
    )


SPLIT = ("transformer", "text_encoder", "vae", "tokenizer")
"""Options that name a model's parts, in place of the model."""


def split_or(
    model: str | None,
    *,
    transformer: Path | None,
    text_encoder: list[Path] | None,
    vae: Path | None,
    tokenizer: Path | None,
) -> str | None:
    """``model``, or a folder for its parts where these are given.

    Raises:
        BadInputError: both are given, or a part is missing or cannot be used.
    """
    if not any((transformer, text_encoder, vae, tokenizer)):
        return model
    if model is not None:
        raise BadInputError(f"--model {model} and the files of a model's parts exclude each other: leave one out")
    for file in (transformer, *(text_encoder or ()), vae, tokenizer):
        check_text("the name of a file", str(file or ""))
    from ..checkpoints.split_files import split_model

    return str(split_model(transformer, text_encoder or (), vae, tokenizer))


def _checked_strength(job: Job) -> float | None:
    if job.init_image is None:
        if job.mask is not None:
            raise BadInputError(f"--mask {job.mask} needs --init-image, the picture of which a part is repainted")
        if job.strength is not None:
            raise BadInputError(f"--strength {job.strength:g} needs --init-image, the picture that is changed so much")
        return None
    strength = job.strength if job.strength is not None else 1.0 if job.mask is not None else 0.75
    if not 0 < strength <= 1:
        raise BadInputError(f"--strength {strength:g} must be above 0 and at most 1 (1: the picture is painted over)")
    if int(job.steps * strength) < 1:
        raise BadInputError(f"--strength {strength:g} of {job.steps} steps is less than one step: raise either")
    return strength
