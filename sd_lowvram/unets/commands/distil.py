"""``sd-lowvram unet distil``: a smaller UNet learns from a larger one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ...commands.exit_codes import exit_on_error
from ...commands.values import check_given
from ...errors import BadInputError
from .unet import Debug, Json, check_layout, empty_unet, unet


@unet.command()
def distil(
    student: Annotated[
        str, typer.Option(help="The smaller model: what `unet prune` or `unet combine` wrote.", metavar="PATH")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Folder of pictures; a .txt file of the same name has the captions, one a line.", metavar="FOLDER"
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Where the trained model goes: a new folder for the pipeline, or a new .safetensors file.",
            metavar="PATH",
        ),
    ],
    teacher: Annotated[
        str | None,
        typer.Option(help="The model that the student learns from; left out: the demo model.", metavar="PATH"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Samples in each step, in every process.")] = 8,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the order of samples and of the noise.")] = 0,
    blocks: Annotated[
        int | None,
        typer.Option(
            help="Train only this many of the outermost blocks on each side of the UNet; left out: all blocks."
        ),
    ] = None,
    semantic: Annotated[
        str | None, typer.Option(help="Also compare the features that a frozen network sees: efficientnet or vgg16.")
    ] = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16; weights stay in float32.")] = False,
    every: Annotated[int, typer.Option(min=1, help="Save a checkpoint after every so many steps.")] = 50,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a smaller UNet to do what a larger one does. Ctrl-C and SIGTERM save after the current step; the same
    command then goes on from there."""
    with exit_on_error(debug):
        check_given(student=student, teacher=teacher, semantic=semantic)
        if not 0 < rate < 1:
            raise BadInputError(f"--rate {rate} must lie between 0 and 1; 1e-4 is usual")
        from rich.console import Console

        from ...commands.show import Bars
        from ..distil import TrainingRun

        run = TrainingRun(steps, batch, rate, seed, blocks, semantic, "bf16" if bf16 else "no", every)
        checkpoint = _checkpoint_of(out)
        check_layout(out, student, empty_unet(student))
        console = Console(stderr=True)
        with Bars(console, not as_json).running():
            last = _train(student, teacher, data, out, run, checkpoint, as_json)
        summary = {"out": str(out), "checkpoint": str(checkpoint), "steps": steps, "losses": last}
        print(json.dumps(summary, indent=2) if as_json else f"written: {out}")


def _checkpoint_of(out: Path) -> Path:
    """Path of the checkpoint next to ``out``, from which an interrupted run resumes; ``out`` must be new."""
    from ...commands.pictures import check_writable
    from ..checkpoints.save import check_new

    check_new(out, "--out")
    target = out.absolute()
    checkpoint = target.with_name(target.name + ".training.pt")
    if not checkpoint.exists():
        check_writable(checkpoint, 1 << 20)
    return checkpoint


def _train(
    student: str, teacher: str | None, data: Path, out: Path, run: Any, checkpoint: Path, quiet: bool
) -> dict[str, float]:
    """Train, write ``out`` and print the last means of the terms (none if all steps were done already)."""
    import torch

    from ...checkpoints.load import load_pipeline
    from ...commands.interrupts import stop_between_steps
    from ..checkpoints.load_stored import load_as_stored
    from ..checkpoints.save import save_pipeline
    from ..distil import distil as train
    from ..layers import own_side
    from ..supervision import check_match
    from ..training_pictures import captioned_pictures, encode_pictures

    items = captioned_pictures(data)
    large, small = load_pipeline(teacher, dtype=torch.float32), load_as_stored(student)
    own, last = small.unet.dtype, {}
    check_match(large.unet, small.unet)
    side = own_side(large.unet)

    def tell(step: int, terms: dict[str, float]) -> None:
        last.update(terms)
        if not quiet:
            print(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in terms.items()), flush=True)

    pictures = encode_pictures(large, items, side)
    with stop_between_steps() as stopped:
        trained = train(large.unet, small.unet, large.vae, large.scheduler, pictures, run, checkpoint, tell, stopped)
    if trained is not None:
        # diffusers' own `to` warns of parts that stay in float32
        small.register_modules(unet=torch.nn.Module.to(trained, own))
        save_pipeline(small, out)
    return last
