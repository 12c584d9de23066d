"""``--preview``: small pictures of a run that is under way, next to the final picture's place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError
from ..files import write_whole
from .streams import note
from .values import MOST_STEPS

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from ..previews.colours import Colours
    from .inputs import Job


def check_preview(every: int | None) -> None:
    """Raise BadInputError unless ``--preview`` is a number of steps that can be waited for."""
    if every is not None and not 1 <= every <= MOST_STEPS:
        raise BadInputError(f"--preview {every} must be from 1 to {MOST_STEPS} steps")


def previews(
    pipe: Any, job: Job, every: int | None, files: list[Path], console: Console
) -> contextlib.AbstractContextManager[None]:
    """Write previews of ``files`` during a run of ``pipe`` within the block, and delete them at its end.

    Args:
        every: steps between two previews; None: no previews.
    """
    if every is None:
        return contextlib.nullcontext()
    if not hasattr(pipe, "unet"):
        raise BadInputError(f"--preview is not for {type(pipe).__name__} yet: leave it out")
    from ..checkpoints.fingerprint import fingerprint
    from ..checkpoints.inspection import model_path
    from ..previews.colours import colours_of, demo_colours

    if job.model is None:
        return _write_previews(pipe, every, demo_colours(), files)
    with console.status("fitting colours of previews"):
        colours = colours_of(pipe.vae, functools.partial(fingerprint, model_path(job.model)))
    return _write_previews(pipe, every, colours, files)


@contextlib.contextmanager
def _write_previews(pipe: Any, every: int, colours: Colours, files: list[Path]) -> Iterator[None]:
    from ..previews.prediction import show_predictions

    places = [file.with_suffix(".preview.png") for file in files]
    try:
        with show_predictions(pipe, every, functools.partial(_write, pipe.vae_scale_factor, colours, places)):
            yield
    finally:
        for place in places:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)


def _write(scale: int, colours: Colours, places: list[Path], step: int, latents: Tensor) -> None:
    from PIL import Image

    from .pictures import png_of

    try:
        for pixels, place in zip(colours.convert(latents).numpy(), places, strict=True):
            small = Image.fromarray(pixels)
            picture = small.resize((small.width * scale, small.height * scale), Image.Resampling.BICUBIC)
            write_whole(png_of(picture, {"parameters": f"preview after step {step}"}), place)
    except OSError as error:
        note(f"no preview after step {step}: {error.strerror or error}")
