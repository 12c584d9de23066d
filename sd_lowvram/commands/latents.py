"""The file next to a picture from which ``resume`` continues: its place, its facts on the run, and reading it."""

from __future__ import annotations

import dataclasses
import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.fingerprint import fingerprint
from ..checkpoints.inspection import model_path
from ..errors import BadInputError
from ..files import __version__
from ..saved_latents.file import ENDING, Saved
from .inputs import Job, check_job
from .values import checked_settings

if TYPE_CHECKING:
    import torch

_OF_ONE_MACHINE = ("settings", "memory_plot", "allow_pickle", "output")
_COLOURS: dict[str, list[int]] = {"image": [3], "mask_image": []}
"""The pictures to start from, as they are stored: their dimensions in addition to height and width."""


def place_of(picture: Path) -> Path:
    """The file for the latents of ``picture``: a new one, as an older one may still be gone on from."""
    stem = os.fsdecode(os.fsencode(picture.stem)[:200])  # file systems take 255 bytes
    first = picture.with_name(stem + ENDING)
    numbered = (first.with_name(f"{stem}-{number}{ENDING}") for number in range(2, 1 << 20))
    return first if not first.exists() else next(place for place in numbered if not place.exists())


def about_run(job: Job, plan: Any, files: list[Path], model: str) -> dict[str, Any]:
    """Facts on a sized ``job`` and its plan that ``resume`` needs, of JSON types.

    Args:
        model: the fingerprint of the model's files.
    """
    values = {field.name: getattr(job, field.name) for field in dataclasses.fields(Job)}
    plain = {name: value for name, value in values.items() if name not in _OF_ONE_MACHINE}
    plain |= {name: str(value) for name, value in plain.items() if isinstance(value, Path)}
    plain |= {"model": job.model and os.path.abspath(job.model), "device": str(plan.request.device)}
    plain |= {"vram": f"{plan.request.vram}B", "ram": f"{plan.request.ram}B"}
    return {
        "version": __version__,
        "libraries": libraries(),
        "job": plain,
        "asked_settings": job.settings.as_dict(),
        "settings": plan.settings.as_dict(),
        "files": [file.name for file in files],
        "model": model,
    }


def libraries() -> dict[str, str]:
    """Versions of what a picture's bits come from."""
    import diffusers
    import torch

    return {"torch": torch.__version__, "diffusers": diffusers.__version__}


def pictures_as_tensors(images: dict[str, Any], size: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The pictures to start from, in the size in which they are used."""
    import numpy
    import torch
    from PIL import Image

    scaled = {name: image.resize(size, Image.Resampling.LANCZOS) for name, image in images.items()}
    return {name: torch.from_numpy(numpy.array(image)) for name, image in scaled.items()}


def pictures_from(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Inverse of :func:`pictures_as_tensors`.

    Raises:
        BadInputError: the tensors are not pictures.
    """
    from PIL import Image

    colours = {name: tensors[name] for name in _COLOURS if name in tensors}
    for name, tensor in colours.items():
        if str(tensor.dtype) != "torch.uint8" or 0 in tensor.shape or [*tensor.shape[2:]] != _COLOURS[name]:
            raise BadInputError(
                f"what was saved as the run's {name} is not a picture: {tuple(tensor.shape)}, {tensor.dtype}"
            )
    return {name: Image.fromarray(tensor.numpy()) for name, tensor in colours.items()}


def job_of(path: Path, saved: Saved, asked: dict[str, Any]) -> tuple[Job, list[Path]]:
    """The run that ``saved`` in ``path`` describes, and its pictures, which belong next to ``path``.

    Args:
        asked: fields of the job that have changed, and its precision if that has. With another budget or precision the
            run is planned anew.

    Raises:
        BadInputError: another version wrote it, its model is not the one that is there now, or it makes no sense.
    """
    about = saved.about
    written_by = about.get("version")
    if written_by != __version__:
        raise BadInputError(
            f"{path} was written by sd-lowvram {written_by}, and this is {__version__}, with which the picture may not "
            "be identical: use that version"
        )
    try:
        job = _changed_job(about, asked)
        files = [path.parent / name for name in about["files"] if Path(name).name == name and name.endswith(".png")]
        if len(files) != job.batch or type(about["step"]) is not int or type(about["steps"]) is not int:
            raise ValueError("it does not name its pictures and steps")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInputError(f"{path} does not describe a run that can be made: {error}") from error
    where = model_path(job.model)
    if not os.path.exists(where):  # False, where pathlib raises for a name that is too long
        raise BadInputError(f"the model of {path} is not at {where} any more: name its path with --model")
    if fingerprint(where) != about.get("model"):
        raise BadInputError(f"{path} is of a run of another model than {where}: name the right one with --model")
    return job, files


def _changed_job(about: dict[str, Any], asked: dict[str, Any]) -> Job:
    values = {name: _value(name, value) for name, value in about["job"].items()}
    knobs = about["asked_settings" if {"vram", "ram", "precision"} & asked.keys() else "settings"]
    decided = {name: value for name, value in knobs.items() if value is not None}
    decided |= {name: value for name, value in asked.items() if name == "precision"}
    overrides = {name: value for name, value in asked.items() if name != "precision"}
    settings = checked_settings(decided, values.get("policy"))
    return check_job(dataclasses.replace(Job(**values, settings=settings), **overrides))


def _value(name: str, value: Any) -> Any:
    """A field of Job as it was; a TypeError where it is of another kind."""
    if name in _OF_ONE_MACHINE:
        raise TypeError(f"it states {name}")
    hint = typing.get_type_hints(Job)[name]
    kinds = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,))
    if value is not None and Path in kinds:
        value = Path(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"its {name} is a {type(value).__name__}")
    return value
