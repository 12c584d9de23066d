"""Trains a teacher of two layers a block and the students of A-SDM's tables (2023), by the commands that everybody has.

    python tools/demo/smaller_unets.py --work WORK --only teacher     # WORK/teacher, a model that can be cut
    python tools/demo/smaller_unets.py --work WORK                    # and its students, WORK/runs

One process and, with OMP_NUM_THREADS=1, one thread; asked to end (Ctrl-C, SIGTERM) it saves after the step at hand,
and the same command goes on. WORK also gets the pictures (`combinations.py`), their latents (of the shipped
autoencoder, whose decoder is polished for them), and the judge (`judge.py`).

Every student has two courses of as many steps, for each seed anew: `base`, `small`, `tiny` and those with experts go
through both; what is put together of two models (M1 to M5) begins with the blocks of that seed's `base` after its first
course, and goes through the second. M1 to M3 keep the teacher's deep blocks as they are, M4 and M5 train all.
WORK/runs/NAME gets `cut` and, for each seed, `trained-SEED`.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import process_time

import combinations
import folder
import judge
import train_autoencoder
import train_unet
from export import export
from train_autoencoder import has_bf16

from sd_lowvram.cli import app
from sd_lowvram.commands.exit_codes import INTERRUPTED
from sd_lowvram.commands.interrupts import stop_between_steps, terminated_as_interrupted


@dataclass(frozen=True)
class Student:
    """A cut of the teacher: what `prune` gets or, with ``blocks``, so many outer blocks of `base` in the teacher."""

    cut: tuple[str, ...] = ()
    blocks: int = 0
    more: tuple[str, ...] = ()  # arguments of `distil`
    trained: bool = True


STUDENTS = {
    "base": Student(("--kind", "base")),
    "m2": Student(blocks=2, more=("--blocks", "2")),
    "m1": Student(blocks=1, more=("--blocks", "1")),
    "small": Student(("--kind", "small")),
    "tiny": Student(("--kind", "tiny")),
    "no-middle": Student(("--drop", "mid"), trained=False),
    "m5": Student(blocks=2),
    "m3": Student(blocks=3, more=("--blocks", "3")),
    "base-e2": Student(("--kind", "base", "--experts", "2")),
    "m4": Student(blocks=1),
    "small-e2": Student(("--kind", "small", "--experts", "2")),
    "tiny-e2": Student(("--kind", "tiny", "--experts", "2")),
    "base-regions": Student(("--kind", "base", "--regions", "4")),
    "base-semantic": Student(("--kind", "base"), more=("--semantic", "efficientnet")),
}


TEACHER = "teacher"
FIRST = ("base", "m2", "m1", "small", "tiny")
"""All seeds of these come first, then all seeds of one other at a time: whenever training is ended for good,
the table has only students that were trained as often."""


def unet(*words: object) -> None:
    """Run `sd-lowvram unet` in this process; it ends the program where it fails or is asked to end."""
    try:
        app(["unet", *map(str, words)])
    except SystemExit as end:
        if end.code:
            raise


def spend(file: Path) -> None:
    """Add the processor time of this run to those before."""
    before = float(file.read_text(encoding="utf-8")) if file.exists() else 0.0
    file.write_text(f"{before + process_time() / 3600:.3f}\n", encoding="utf-8")


def make_teacher(args: argparse.Namespace) -> None:
    work: Path = args.work
    if not (work / "held.json").exists():
        combinations.make(work, args.alone, args.together, args.held)
    if not (work / "latents.pt").exists():
        train_autoencoder.shipped(argparse.Namespace(work=work))
    if not (work / "teacher").exists():
        with stop_between_steps() as stopped:
            told = {"work": work, "batch": args.batch, "rate": args.rate, "seed": 0}
            unet_told = argparse.Namespace(
                steps=args.teacher_steps,
                until=args.teacher_steps,
                layers=2,
                channels=args.channels,
                processes=1,
                **told,
            )
            told["batch"] = min(args.batch, 24)
            decoder_told = argparse.Namespace(phase="decoder", steps=args.decoder_steps, **told)
            if train_unet.train(0, unet_told, stopped) < args.teacher_steps:
                raise SystemExit(INTERRUPTED)
            if args.decoder_steps and train_autoencoder.train(decoder_told, stopped) < args.decoder_steps:
                raise SystemExit(INTERRUPTED)
        export(work, work / "autoencoder-decoder.pt" if args.decoder_steps else None, work / "teacher.new")
        (work / "teacher.new").rename(work / "teacher")
    if not (work / "judge.json").exists():
        judge.train(work, args.judge_steps)
    if not (work / "folder").exists():
        folder.write(work, work / "folder.new")
        (work / "folder.new").rename(work / "folder")


def cut(name: str, student: Student, args: argparse.Namespace, state: str, base: str) -> Path:
    """The student with the weights that it inherits, those of `base` before it was trained or after a course."""
    runs, teacher = args.work / "runs", args.work / "teacher"
    out: Path = runs / name / state
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        if student.blocks:
            unet(
                "combine", "--compressed", runs / "base" / base, "-m", teacher, "--blocks", student.blocks, "--out", out
            )
        else:
            unet("prune", "-m", teacher, *student.cut, "--out", out)
    return out


def course(start: Path, out: Path, seed: int, student: Student, args: argparse.Namespace) -> None:
    """A course of training; the same one again where ``out`` is there already."""
    if out.exists():
        return
    models = ("--teacher", args.work / "teacher", "--student", start, "--data", args.work / "folder")
    told = ("--steps", args.steps, "--batch", args.batch, "--rate", args.rate, "--seed", seed, "--every", 100)
    unet("distil", *models, *told, *(["--bf16"] if has_bf16() else []), *student.more, "--out", out)
    out.with_name(out.name + ".training.pt").unlink()


def train(name: str, seed: int, args: argparse.Namespace) -> None:
    student, own = STUDENTS[name], args.work / "runs" / name
    print(f"{name}, seed {seed}", flush=True)
    start = cut(name, student, args, "cut", "cut")
    if not student.trained or (own / f"trained-{seed}").exists():
        return
    if student.blocks:
        start = cut(name, student, args, f"half-{seed}", f"half-{seed}")
    else:
        course(start, own / f"half-{seed}", 2 * seed, student, args)
        start = own / f"half-{seed}"
    course(start, own / f"trained-{seed}", 2 * seed + 1, student, args)
    if name != "base":  # other trainings begin with it
        shutil.rmtree(own / f"half-{seed}")


def work_on(args: argparse.Namespace) -> None:
    make_teacher(args)
    rest = [[name] for name in STUDENTS if name not in FIRST]
    for group, seed in product([FIRST, *rest], range(args.seeds)):
        for name in group:
            if name in args.only:
                train(name, seed, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is not committed")
    names = (TEACHER, *STUDENTS)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="some of them (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="each student is trained so often")
    parser.add_argument("--steps", type=int, default=800, help="of each of a student's two courses")
    parser.add_argument("--teacher-steps", type=int, default=6000)
    parser.add_argument("--decoder-steps", type=int, default=1200, help="0: the shipped decoder as it is")
    parser.add_argument("--channels", type=int, nargs=4, default=train_unet.CHANNELS, help="of the teacher's levels")
    parser.add_argument("--judge-steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    combinations.add_counts(parser)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        with terminated_as_interrupted():
            work_on(args)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        spend(args.work / "hours.txt")


if __name__ == "__main__":
    main()
