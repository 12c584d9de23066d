"""Measures the teacher and the students on prompts that no picture of training has, with the spread of their seeds.

    python tools/demo/measure.py --work WORK [--out TABLE.md] [--sheet SHEET.png]

What is measured is stored in WORK/measured, so that the same command goes on. Student number SEED and the teacher with
it draw each held-out picture once from the same noise, other noise for every SEED; the judge (`judge.py`) says what
the pictures show. Two rows are said to differ if every seed of one is above every seed of the other; of three seeds
each chance alone does that once in ten times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from itertools import combinations as combinations_of
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from combinations import HUES, PLACES, THINGS, Combination, caption, read, unseen_pair
from judge import score, verdict
from picture_rows import picture_rows_png
from torch import Tensor
from train_unet import phrase

from sd_lowvram.files import table, write_json, write_whole
from sd_lowvram.unets.checkpoints.load_unet import load_unet
from sd_lowvram.unets.evaluate import AT_ONCE, Draw, agreement, draw_pictures, pipeline_to_draw
from sd_lowvram.unets.schedule import scheduled

TEACHER = "teacher"
SHARES = {
    "s1": (("base", 0.4), (TEACHER, 0.6)),
    "s2": ((TEACHER, 0.6), ("base", 0.4)),
    "s3": ((TEACHER, 0.4), ("base", 0.6)),
}
"""Who takes which share of the steps, in this order: 10 and 15 of 25 in the source."""
PUBLISHED = {
    "m2": 11.840, TEACHER: 12.832, "m1": 13.049, "m5": 13.222, "m4": 13.377, "base": 14.426, "base-e2": 14.963,
    "small-e2": 16.056, "small": 17.120, "tiny-e2": 17.470, "tiny": 18.670, "m3": 20.037,
}  # fmt: skip
"""FID of the source, COCO at 256x256: lower is better. Each pair of two that are here is compared."""
SCHEDULED = {"s1": 12.900, "s2": 13.529, "s3": 13.548}
"""The same of its schedules, which are compared with each other."""
SHOWN = 8


@contextlib.contextmanager
def in_place(pipe: Any, name: str, seed: int, runs: Path, steps: int) -> Iterator[None]:
    """Inside, ``pipe`` draws with the student's UNet, or with base's and its own in turn."""
    own = pipe.unet
    if name == TEACHER:
        yield
        return
    folder = runs / ("base" if name in SHARES else name)
    state = f"trained-{seed}" if (folder / f"trained-{seed}").is_dir() else "cut"
    student = load_unet(folder / state / "unet", own.dtype)
    if name in SHARES:
        first = round(steps * SHARES[name][0][1])
        turns = [own if who == TEACHER else student for who, _ in SHARES[name]]
        with scheduled(pipe, [(turns[0], first), (turns[1], steps - first)], batch=AT_ONCE, device="cpu"):
            yield
        return
    try:
        pipe.register_modules(unet=student)
        yield
    finally:
        pipe.register_modules(unet=own)


def found(runs: Path, seed: int) -> list[str]:
    """Who can be measured: the teacher first, students of this seed, schedules where base is one."""
    names = [
        folder.parent.name for folder in sorted(runs.glob(f"*/trained-{seed}"), key=lambda one: one.stat().st_mtime)
    ]
    return [TEACHER, *names, *(SHARES if "base" in names else ())]


def drawn_in(args: argparse.Namespace) -> Path:
    found: Path = args.work / "measured" / f"{args.steps}-{args.guidance:g}-{args.every}"
    return found


def measure(args: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Name -> seed -> figures."""
    work: Path = args.work
    drawn = drawn_in(args)
    drawn.mkdir(parents=True, exist_ok=True)
    parts = read(work, held=True)[1][:: args.every]
    prompts = [phrase("a {}", caption(each)) for each in parts]
    judge, pipe = torch.jit.load(work / "judge.pt"), pipeline_to_draw(str(work / "teacher"))
    report: dict[str, dict[str, dict[str, float]]] = {}
    for seed in range(args.seeds):
        for name in found(work / "runs", seed):
            kept = drawn / f"{name}-{seed}.pt"
            if not kept.exists():
                with in_place(pipe, name, seed, work / "runs", args.steps):
                    pictures = draw_pictures(
                        pipe, prompts, Draw(len(prompts), args.steps, args.guidance, seed * len(prompts))
                    )
                torch.save((pictures.clamp(-1, 1) * 127).round().to(torch.int8), kept.with_suffix(".tmp"))
                kept.with_suffix(".tmp").rename(kept)
            pictures, theirs = (torch.load(drawn / f"{who}-{seed}.pt").float() / 127 for who in (name, TEACHER))
            report.setdefault(name, {})[str(seed)] = figures(judge, pictures, theirs, parts)
            print(f"{name}, seed {seed}: {json.dumps(report[name][str(seed)])}", flush=True)
    return report


def figures(judge: Any, pictures: Tensor, theirs: Tensor, parts: list[tuple[Combination, ...]]) -> dict[str, float]:
    """The judge's shares of right pictures, also of those whose thing was never seen in that colour ("unseen") and of
    canvases of two ("two"), and the agreement with the teacher's pictures."""
    right = verdict(judge, pictures, parts)
    unseen = torch.tensor([any(map(unseen_pair, each)) for each in parts])
    two = torch.tensor([len(each) > 1 for each in parts])
    some = {name: right[where].all(dim=1).float().mean().item() for name, where in (("unseen", unseen), ("two", two))}
    return {**score(right), **some, "psnr": agreement(pictures, theirs)["psnr"]}


def apart(first: dict[str, dict[str, float]], second: dict[str, dict[str, float]], figure: str) -> int:
    """1: every seed of the first is above every one of the second, -1: below, 0: they do not differ."""
    ours, theirs = ([each[figure] for each in row.values()] for row in (first, second))
    return (min(ours) > max(theirs)) - (max(ours) < min(theirs))


def lines(report: dict[str, Any]) -> Iterator[str]:
    """What :func:`main` found, as Markdown."""
    rows, scores, asked = report["rows"], report["judge"], report["asked"]
    yield "# Smaller UNets, trained: what they draw of what they were never shown"
    yield ""
    yield (
        f"{asked['pictures']} pictures of {asked['steps']} steps, guidance {asked['guidance']:g}, of combinations of "
        "thing, colour and place that no picture of training has (`tools/demo/combinations.py` has the rule), one or "
        "two on a canvas. *Right*: share of pictures in which a judge that was trained on real pictures alone finds "
        "all that was asked for; *unseen*: of those with a thing that training never showed in this colour; *two*: of "
        f"canvases of two. Of real held-out pictures it finds {scores['real']['all']:.1%} right, and of the same "
        f"through the autoencoder, beyond which no UNet can come, {scores['autoencoder']['all']:.1%}. {_limits()} "
        "*PSNR*: from the "
        f"teacher's pictures of the same noise. {_spread(rows)} Steps of training: teacher {asked['teacher_steps']}, "
        "all students the same."
    )
    yield ""
    heads = ["UNet", "seeds", "right", "thing", "colour", "place", "unseen", "two", "PSNR"]
    yield from table(heads, (_cells(name, row) for name, row in rows.items()))
    yield ""
    if _seeds(rows) < 2:
        yield "One seed shows no difference between rows."
        return
    for published in (PUBLISHED, SCHEDULED):
        for better, worse in combinations_of(sorted(published.keys() & rows.keys(), key=published.__getitem__), 2):
            figures_there = ("all",) if TEACHER in (better, worse) else ("all", "psnr")
            yield f"- {better} over {worse}, as the source has it: {_told(rows[better], rows[worse], figures_there)}"
    whole = fmean(_all(rows[TEACHER], "all"))
    if below := [name for name, row in rows.items() if name != TEACHER and fmean(_all(row, "all")) >= whole]:
        yield f"- The teacher, trained for its steps, does not come out better than {', '.join(below)}."
    else:
        yield "- The teacher is better than every student."


def _seeds(rows: dict[str, Any]) -> int:
    return max(map(len, rows.values()))


def _spread(rows: dict[str, Any]) -> str:
    if _seeds(rows) < 2:
        return "Each was trained once, and drew from one seed."
    return (
        "Mean over the seeds of training, lowest to highest behind it; the teacher was trained once and drew from as "
        "many seeds. Rows differ where every seed of one is above every seed of the other."
    )


def _limits() -> str:
    return (
        f"An answer by lot is right for one in {len(THINGS) * len(HUES) * len(PLACES)} pictures of one thing. "
        "The judge always names one thing, one colour and one place. So it sees neither what else is in the picture, "
        "nor blur, nor faults of a shape. Of two things it gets each one's half, so that their places are given."
    )


def _all(row: dict[str, dict[str, float]], figure: str) -> list[float]:
    return [each[figure] for each in row.values()]


def _cells(name: str, row: dict[str, dict[str, float]]) -> list[str]:
    shares = [_cell(_all(row, figure), "{:.1%}") for figure in ("all", "thing", "colour", "place", "unseen", "two")]
    return [name, str(len(row)), *shares, "-" if name == TEACHER else _cell(_all(row, "psnr"), "{:.1f} dB")]


def _cell(values: list[float], form: str) -> str:
    if len(values) < 2:
        return form.format(values[0])
    return f"{form.format(fmean(values))} ({form.format(min(values))} to {form.format(max(values))})"


def _told(first: dict[str, dict[str, float]], second: dict[str, dict[str, float]], figures_there: Sequence[str]) -> str:
    if min(len(first), len(second)) < 2:
        return "one seed, which tells nothing."
    return "; ".join(_ordering(first, second, figure) for figure in figures_there) + "."


def _ordering(first: dict[str, dict[str, float]], second: dict[str, dict[str, float]], figure: str) -> str:
    """Who is ahead, and by how much the worst seed of the one is from the best of the other."""
    word, form = {"all": ("right", "{:.1%}"), "psnr": ("PSNR", "{:.3f} dB")}[figure]
    order = apart(first, second, figure)
    if order == 0:
        return f"{word}: no difference beyond the spread"
    above, below = (first, second) if order > 0 else (second, first)
    gap = form.format(min(_all(above, figure)) - max(_all(below, figure)))
    return f"{word}: {'so here too' if order > 0 else 'here the other way round'}, by {gap}"


def sheet(args: argparse.Namespace, names: list[str]) -> bytes:
    """Some pictures of seed 0, a row for each who drew them."""
    parts = read(args.work, held=True)[1][:: args.every]
    places = torch.linspace(0, len(parts) - 1, min(SHOWN, len(parts))).round().long()
    rows = {name: torch.load(drawn_in(args) / f"{name}-0.pt")[places].float() / 127 for name in names}
    return picture_rows_png(rows, [caption(parts[place]) for place in places.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of smaller_unets.py")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25, help="of each picture")
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--every", type=int, default=1, help="take one of so many held-out pictures")
    parser.add_argument("--out", type=Path, help="the table as Markdown, and as JSON beside it")
    parser.add_argument("--sheet", type=Path, help="a PNG with some of the pictures")
    args = parser.parse_args()
    rows = measure(args)
    asked = {
        "pictures": len(read(args.work, held=True)[1][:: args.every]),
        "steps": args.steps,
        "guidance": args.guidance,
    }
    asked["teacher_steps"] = torch.load(args.work / "unet.pt")["step"]
    told = json.loads((args.work / "judge.json").read_text(encoding="utf-8"))["scores"]
    report = {"asked": asked, "judge": told, "rows": rows}
    print("\n".join(lines(report)))
    if args.out:
        write_json(report, args.out.with_suffix(".json"))
        write_whole(("\n".join(lines(report)) + "\n").encode(), args.out)
    if args.sheet:
        write_whole(sheet(args, [*rows]), args.sheet)


if __name__ == "__main__":
    main()
