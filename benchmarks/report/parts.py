"""The parts of the report: the command of each, which takes minutes, and where what it measured is kept."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_lowvram.files.whole import write_json, write_whole
from sd_lowvram.policies.named import POLICIES

from ..commands.options import run_command
from ..max_size import PUBLISHED

Report = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A measurement.

    Attributes:
        minutes: approximate duration on two cores.
        command: the words after ``python -m benchmarks``; ``{folder}`` is the folder of the parts.
    """

    name: str
    minutes: float
    command: str

    def lines(self, report: Report) -> Iterable[str]:
        """Table of the measurement."""
        module: Any = importlib.import_module(f"benchmarks.{self.command.split()[0].replace('-', '_')}")
        lines: Iterable[str] = module.lines(report)
        return lines

    def kept(self, folder: Path) -> Report | None:
        """Earlier result, or None if it is incomplete."""
        done, file = folder / f"{self.name}.done", folder / f"{self.name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if done.is_file() and file.is_file() else None

    def collect(self, known: Path, folder: Path) -> None:
        """Take what the part's command has written into ``known`` before, where it has."""
        file = known / f"{self.name}.json"
        if file.is_file():
            write_whole(file.read_bytes(), folder / file.name)
            (folder / f"{self.name}.done").touch()

    def measured(self, folder: Path, program: Any) -> Report:
        """Measure it, in ``folder``, by its command among those of ``program``."""
        words = self.command.format(folder=shlex.quote(str(folder)))
        report = run_command(program, words, folder / f"{self.name}.md")
        write_json(report, folder / f"{self.name}.json")  # a matrix names its files itself
        (folder / f"{self.name}.done").touch()
        return report


def parts(quick: bool) -> tuple[Measurement, ...]:
    """All parts, in the order in which they are measured: small ones, or those of a whole report."""
    return _SMALL if quick else _WHOLE


def _named(*names: str) -> str:
    return "".join(f" --policy {name}" for name in names)


_FEW = _named("compvis", "basujindal-turbo", "consciencia-modified", "ours")
_OTHERS = _named(*(name for name, one in POLICIES.items() if not one.own and name != "ours"))

_FIT = Measurement("fit", 0.1, "fit {folder}/matrix.json")

_SMALL = (
    Measurement("same", 1, "same --steps 4"),
    Measurement("steps", 1.5, f"steps --to 30{_FEW}"),
    Measurement("variance", 1, f"variance --steps 4 --runs 10{_FEW}"),
    Measurement("warmup", 1, f"warmup --steps 4{_FEW}"),
    Measurement("largest", 1, f"max-size --vram 80MiB{_named('compvis', 'basujindal')}"),
    Measurement("matrix", 1, "matrix --steps 4 --from 64 --to 192 --out {folder}"),
    _FIT,
)
_WHOLE = (
    Measurement("published", 10, "published"),
    Measurement("cards", 3, "cards"),
    Measurement("largest_rtx2070", 15, f"max-size --gpu rtx2070{_named('ours', *PUBLISHED)}"),
    Measurement("end_to_end", 10, "end-to-end"),
    Measurement("same", 2, "same"),
    Measurement("peers", 2, "peers"),
    Measurement("warmup", 3, "warmup"),
    Measurement("largest_demo_16", 5, "max-size --vram 16MiB"),
    Measurement("variance", 4, "variance"),
    Measurement("largest_demo", 5, f"max-size --vram 96MiB{_OTHERS}"),
    Measurement("matrix", 4, "matrix --steps 8 --from 64 --to 384 --out {folder}"),
    _FIT,
    Measurement("steps", 5, f"steps{_FEW}"),
    Measurement("ladder", 4, "ladder --model demo"),
)
