"""Cuts and trains the students of A-SDM's tables (2023), by the commands that everybody has.

    python tools/demo/smaller_unets.py --teacher MODEL --data PICTURES --runs RUNS
    python -m benchmarks students --teacher MODEL --data PICTURES --students RUNS --out benchmarks/smaller_unets.md

MODEL has two layers a block (`train_unet.py --layers 2`), PICTURES is what `folder.py` wrote. Ended at any time, the
same command goes on. RUNS/NAME gets `cut`, `trained` and `course.json`, and `base` comes first: what is put together
of two models (M1 to M5) begins with its trained blocks. M1 to M3 keep the teacher's deep blocks as they are, M4 and M5
train all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Student:
    """A cut of the teacher: what `prune` is told or, with ``blocks``, so many outer blocks of `base` in the teacher."""

    cut: tuple[str, ...] = ()
    blocks: int = 0
    more: tuple[str, ...] = ()  # told to `distil`
    trained: bool = True


STUDENTS = {
    "base": Student(("--kind", "base")),
    "m2": Student(blocks=2, more=("--blocks", "2")),
    "m1": Student(blocks=1, more=("--blocks", "1")),
    "no-middle": Student(("--drop", "mid"), trained=False),
    "small": Student(("--kind", "small")),
    "tiny": Student(("--kind", "tiny")),
    "base-e2": Student(("--kind", "base", "--experts", "2")),
    "m5": Student(blocks=2),
    "m4": Student(blocks=1),
    "m3": Student(blocks=3, more=("--blocks", "3")),
    "small-e2": Student(("--kind", "small", "--experts", "2")),
    "tiny-e2": Student(("--kind", "tiny", "--experts", "2")),
    "base-regions": Student(("--kind", "base", "--regions", "4")),
    "base-semantic": Student(("--kind", "base"), more=("--semantic", "efficientnet")),
}


def unet(*words: object) -> None:
    """Run `sd-lowvram unet`, or end with what it said."""
    done = subprocess.run([sys.executable, "-m", "sd_lowvram", "unet", *map(str, words)], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def cut(name: str, student: Student, args: argparse.Namespace, state: str, base: str) -> Path:
    """The student with the weights that it inherits, those of `base` before it was trained or after."""
    out: Path = args.runs / name / state
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        if student.blocks:
            compressed = args.runs / "base" / base
            unet("combine", "--compressed", compressed, "-m", args.teacher, "--blocks", student.blocks, "--out", out)
        else:
            unet("prune", "-m", args.teacher, *student.cut, "--out", out)
    return out


def train(name: str, student: Student, args: argparse.Namespace) -> None:
    folder: Path = args.runs / name
    if not (folder / "trained").exists():
        start = cut(name, student, args, "start", "trained") if student.blocks else folder / "cut"
        course = {"steps": args.steps, "batch": args.batch, "rate": args.rate}
        told = [word for key, value in course.items() for word in (f"--{key}", value)]
        models = ("--teacher", args.teacher, "--student", start, "--data", args.data)
        unet("distil", *models, *told, "--bf16", "--every", 100, *student.more, "--out", folder / "trained")
        (folder / "course.json").write_text(json.dumps(course), encoding="utf-8")
    shutil.rmtree(folder / "start", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True, help="a diffusers folder")
    parser.add_argument("--data", type=Path, required=True, help="pictures with captions")
    parser.add_argument("--runs", type=Path, required=True, help="a folder for the students")
    parser.add_argument("--only", nargs="*", choices=STUDENTS, help="some of them (default: all, in this order)")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    args = parser.parse_args()
    for name in args.only or STUDENTS:
        student = STUDENTS[name]
        print(name, flush=True)
        cut(name, student, args, "cut", "cut")
        if student.trained:
            train(name, student, args)


if __name__ == "__main__":
    main()
