"""Marks in the pictures of a batch that identify their jobs, so that a lost journal can be rebuilt."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..commands.inputs import Job
from .jobs import Task, digest_of

if TYPE_CHECKING:
    from PIL.Image import Image

CHUNK = "sd-lowvram job"
"""The name of the PNG text chunk."""

_THUMBNAIL = (256, 256)


@dataclass(frozen=True)
class FinishedPicture:
    """A finished picture: PNG and, small, JPEG."""

    png: bytes
    thumbnail: bytes


def mark_of(job: Job, number: int) -> str:
    """The mark in picture ``number`` of ``job``."""
    return json.dumps({"job": _digest(job), "seed": job.seed, "number": number, "of": job.batch})


def _digest(job: Job) -> str:
    return digest_of(dataclasses.replace(job, seed=None))


class Found:
    """The jobs whose pictures are all in ``folder``, by what they say of themselves; each is given away once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: list[tuple[str, int, dict[int, str]]] = []
        gathered: dict[tuple[str, int, int], dict[int, str]] = {}
        counts: dict[tuple[str, int, int], int] = {}
        for name, mark in _marks(folder):
            key = mark["job"], mark["seed"], 0
            while mark["number"] in gathered.get(key, {}):  # the same job once more
                key = (*key[:2], key[2] + 1)
            gathered.setdefault(key, {})[mark["number"]] = name
            counts[key] = mark["of"]
        for key, names in gathered.items():
            if sorted(names) == list(range(counts[key])):
                self._jobs.append((key[0], key[1], names))

    def take(self, task: Task, wanted: list[str] | None) -> tuple[int, list[str]] | None:
        """The seed and the pictures' names of ``task``; None where they are not all there.

        Args:
            wanted: the names that it asks for, where it asks for any.
        """
        kind = _digest(task.job)
        any_seed = task.key.rpartition("-")[0] == kind  # the file leaves it open
        for place, (job, seed, names) in enumerate(self._jobs):
            files = [names[number] for number in sorted(names)]
            if job == kind and (any_seed or seed == task.job.seed) and wanted in (None, files):
                del self._jobs[place]
                return seed, files
        return None

    def picture(self, name: str) -> FinishedPicture:
        """The picture ``name``, with a new thumbnail."""
        from PIL import Image

        png = (self._folder / name).read_bytes()
        with Image.open(io.BytesIO(png)) as image:
            return FinishedPicture(png, thumbnail(image))


def _marks(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Marks of all complete pictures below ``folder``, by name."""
    from PIL import Image

    for file in sorted(folder.rglob("*.png")):
        try:
            with Image.open(file) as image:
                mark = json.loads(image.info[CHUNK])
                image.load()
        except (OSError, KeyError, ValueError, SyntaxError):  # none of a batch, or damaged
            continue
        numbers = [mark.get(name) for name in ("seed", "number", "of")] if isinstance(mark, dict) else [None]
        if all(type(number) is int for number in numbers) and isinstance(mark.get("job"), str):
            yield file.relative_to(folder).as_posix(), mark


def thumbnail(image: Image) -> bytes:
    """A small JPEG of ``image``."""
    small = image.copy()
    small.thumbnail(_THUMBNAIL)
    data = io.BytesIO()
    small.convert("RGB").save(data, format="JPEG", quality=80)
    return data.getvalue()
