"""The parts of the report: how each is measured, which takes minutes, and where it is kept so that a report goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_lowvram.files.whole import write_whole
from sd_lowvram.policies.named import POLICIES
from sd_lowvram.units import MIB

from .. import (
    cards,
    end_to_end,
    fit,
    ladder,
    matrix,
    max_size,
    peers,
    published,
    same,
    steps,
    variance,
    warmup,
)
from ..tables import told_as, written

Report = dict[str, Any]
_FEW = ("compvis", "basujindal-turbo", "consciencia-modified", "ours")
_OTHERS = tuple(name for name, one in POLICIES.items() if not one.own and name != "ours")


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        command: that measures it alone, as a person would type it.
        minutes: about how long it takes on two cores.
        run: measures, goes on with what is in the file, and writes Markdown and JSON beside each other.
        lines: its table.
    """

    name: str
    command: str
    minutes: float
    run: Callable[[Path], Report]
    lines: Callable[[Report], Iterable[str]]

    def kept(self, folder: Path) -> Report | None:
        """What was measured before, None where it is not whole."""
        done, file = folder / f"{self.name}.done", folder / f"{self.name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if done.is_file() and file.is_file() else None

    def collect(self, known: Path, folder: Path) -> None:
        """Take what the part's command has written into ``known`` before, where it has."""
        file = known / f"{self.name}.json"
        if file.is_file():
            write_whole(file.read_bytes(), folder / file.name)
            (folder / f"{self.name}.done").touch()

    def measured(self, folder: Path) -> Report:
        """Measure it, in ``folder``."""
        with told_as(f"python -m benchmarks {self.command}"):
            report = self.run(folder / f"{self.name}.md")
        (folder / f"{self.name}.done").touch()
        return report


def parts(quick: bool) -> list[Measurement]:
    """All parts, in the order in which they are measured: small ones, or those of a whole report."""
    return _small() if quick else _whole()


def _small() -> list[Measurement]:
    return [_same(4, 1), _steps(30, 1.5), _variance(4, 10, _FEW, 1), _warmup(4, _FEW, 1),
            _largest("largest", 80, ("compvis", "basujindal"), 1), _matrix(4, 192, 1), _fit()]  # fmt: skip


def _whole() -> list[Measurement]:
    return [_published(10), _cards(3), _foretold(15), _end_to_end(10), _same(8, 2), _peers(2), _warmup(8, (), 3),
            _largest("largest_demo_16", 16, (), 5), _variance(8, 30, (), 4), _largest("largest_demo", 96, _OTHERS, 5),
            _matrix(8, 384, 4), _fit(), _steps(100, 5), _ladder(4)]  # fmt: skip


def _named(names: Sequence[str]) -> str:
    return "".join(f" --policy {name}" for name in names)


def _same(drawn: int, minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return same.run(None, size=128, steps=drawn, out=out)

    return Measurement("same", f"same --size 128 --steps {drawn}", minutes, run, same.lines)


def _steps(most: int, minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return steps.run(None, _FEW, counts=range(10, most + 1, 10), out=out)

    return Measurement("steps", f"steps --to {most}{_named(_FEW)}", minutes, run, steps.lines)


def _variance(drawn: int, in_a_row: int, names: Sequence[str], minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return variance.run(None, names, steps=drawn, runs=in_a_row, out=out)

    command = f"variance --size 128 --steps {drawn} --runs {in_a_row}{_named(names)}"
    return Measurement("variance", command, minutes, run, variance.lines)


def _warmup(drawn: int, names: Sequence[str], minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return warmup.run(None, names, steps=drawn, out=out)

    return Measurement("warmup", f"warmup --size 128 --steps {drawn}{_named(names)}", minutes, run, warmup.lines)


def _largest(name: str, mib: int, names: Sequence[str], minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return max_size.measured(None, names, cap=mib * MIB, out=out)

    return Measurement(name, f"max-size --vram {mib}MiB{_named(names)}", minutes, run, max_size.lines)


def _matrix(drawn: int, last: int, minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        found = matrix.run(None, range(64, last + 1, 64), steps=drawn, out=out.parent)
        return written(found, matrix.lines, out)

    return Measurement("matrix", f"matrix --steps {drawn} --from 64 --to {last}", minutes, run, matrix.lines)


def _fit() -> Measurement:
    def run(out: Path) -> Report:
        return fit.run([out.with_name("matrix.json")], out=out)

    return Measurement("fit", "fit matrix.json", 0.1, run, fit.lines)


def _end_to_end(minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return end_to_end.run(out=out)

    return Measurement("end_to_end", "end-to-end", minutes, run, end_to_end.lines)


def _peers(minutes: float) -> Measurement:
    return Measurement("peers", "peers", minutes, lambda out: peers.run(out=out), peers.lines)


def _ladder(minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return ladder.run("B", model="demo", out=out)

    return Measurement("ladder", "ladder --of B --model demo", minutes, run, ladder.lines)


def _cards(minutes: float) -> Measurement:
    return Measurement("cards", "cards", minutes, lambda out: cards.run(out=out), cards.lines)


def _foretold(minutes: float) -> Measurement:
    def run(out: Path) -> Report:
        return max_size.foretold("rtx2070", ("ours", *max_size.PUBLISHED), out=out)

    command = f"max-size --gpu rtx2070{_named(('ours', *max_size.PUBLISHED))}"
    return Measurement("largest_rtx2070", command, minutes, run, max_size.lines)


def _published(minutes: float) -> Measurement:
    return Measurement("published", "published", minutes, lambda out: published.run(out=out), published.lines)
