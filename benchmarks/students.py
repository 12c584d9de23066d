"""``students``: what distilled UNets are worth beside their teacher, and what they save; the tables of
A-SDM (2023) in our terms, its figures beside.

The students lie in one folder, each in a folder of its name: ``cut``, the model before it was trained, ``trained``, the
one after, and ``course.json``, how long that took; what is not there is left out. Where ``base`` is trained, it also
takes turns with the teacher within one run, as in S1, S2 and S3 of the source.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.errors import BadInputError
from sd_lowvram.files.tables import table
from sd_lowvram.files.whole import write_whole
from sd_lowvram.units import format_size

from .tables import pair_cells, written

PUBLISHED = {
    "teacher": "12.832 / 36.653 / 0.297",
    "base": "14.426 / 33.403 / 0.288",
    "small": "17.120 / 31.271 / 0.268",
    "tiny": "18.670 / 27.730 / 0.257",
    "base-e2": "14.963 / 33.522 / 0.288",
    "small-e2": "16.056 / 31.740 / 0.274",
    "tiny-e2": "17.470 / 28.720 / 0.263",
    "m1": "13.049 / 37.848 / 0.298",
    "m2": "11.840 / 36.560 / 0.296",
    "m3": "20.037 / 22.338 / 0.249",
    "m4": "13.377 / 37.957 / 0.298",
    "m5": "13.222 / 37.726 / 0.299",
    "s1": "12.900 / 35.651 / 0.297",
    "s2": "13.529 / 34.560 / 0.294",
    "s3": "13.548 / 36.720 / 0.295",
}
"""FID, inception score and CLIP score of SD1.5 on COCO, by the student's name."""

_OWN = "teacher"
_TIMES = ("plain_seconds", "seconds", "ratio", "plain_spread", "spread", "ratio_spread", "own")
SCHEDULES = {
    "s1": (("base", 0.4), (_OWN, 0.6)),
    "s2": ((_OWN, 0.6), ("base", 0.4)),
    "s3": ((_OWN, 0.4), ("base", 0.6)),
}
"""Who takes which share of the steps: 10 and 15 of 25 in the source."""

CUT, TRAINED = "cut", "trained"
OTHERS = "other seeds"
_SHOWN = 10
_FEW = 32
"""So many prompts tell what a cut is worth before it is trained: little."""


def run(
    students: Path,
    data: Path,
    teacher: str | None = None,
    out: Path | None = None,
    sheet: Path | None = None,
    draw: Any = None,
    pairs: int = 15,
    semantic: str = "efficientnet",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Draw with the teacher and with every student, and measure steps on the CPU; with ``out`` written as Markdown, and
    as JSON beside it, with ``sheet`` some of the pictures as a PNG.

    Args:
        students, data: folders, of students and of captioned pictures.
        draw: a :class:`sd_lowvram.unets.evaluate.Draw`; None: its defaults.
        dtype: of all that is computed but the measures.

    Raises:
        BadInputError: no students, or one that does not match the teacher.
    """
    from sd_lowvram.unets.evaluate import STEPS_TIMED, Draw, drawn_by, ground_of, measures, pipeline_to_draw, prompts_of
    from sd_lowvram.unets.frozen import frozen_features
    from sd_lowvram.unets.training_pictures import captioned_pictures

    draw = draw or Draw()
    runs = _runs(students)
    pipe = pipeline_to_draw(teacher, dtype)
    draws = {TRAINED: draw, CUT: replace(draw, pictures=min(_FEW, draw.pictures))}
    items, features = captioned_pictures(data), frozen_features(semantic)
    ground = ground_of(pipe, items, features, draw)
    few, places = prompts_of(items, draws[CUT])
    grounds = {TRAINED: ground, CUT: replace(ground, prompts=few, places=places)}
    turns = len(runs) + 3
    theirs = {
        state: drawn_by(pipe, grounds[state].prompts, draws[state], turn=(turn, turns))
        for turn, state in enumerate(draws)
    }
    others = drawn_by(pipe, grounds[TRAINED].prompts, draw, draw.pictures, (2, turns))
    shown = {_OWN: theirs[TRAINED], OTHERS: others}
    rows: dict[str, dict[str, Any]] = {
        name: {TRAINED: measures(pictures, theirs[TRAINED], grounds[TRAINED])} for name, pictures in shown.items()
    }
    for turn, (name, state) in enumerate(runs, 3):
        with _in_place(pipe, students, name, state, draw.steps):
            pictures = drawn_by(pipe, grounds[state].prompts, draws[state], turn=(turn, turns))
        rows.setdefault(name, {})[state] = measures(pictures, theirs[state], grounds[state])
        if state == TRAINED:
            shown[name] = pictures
    _time(pipe.unet, students, dict(runs), rows, pairs)
    asked = {"draw": asdict(draw), "features": semantic, "pairs": pairs, "threads": torch.get_num_threads()}
    asked["steps_timed"] = STEPS_TIMED
    asked["dtype"] = str(dtype).removeprefix("torch.")
    report = {**asked, "torch": torch.__version__, "rows": [{"name": name, **row} for name, row in rows.items()]}
    written(report, lines, out)
    if sheet is not None:
        _show(shown, grounds[TRAINED].prompts, sheet)
    return report


def _time(teacher: Any, students: Path, states: dict[str, str], rows: dict[str, dict[str, Any]], pairs: int) -> None:
    """Put into ``rows`` what a step of each takes, and how long the student was trained."""
    rows[_OWN] |= _saved(teacher, teacher, pairs)
    for number, (name, state) in enumerate(states.items()):
        if name in SCHEDULES:
            rows[name] |= _shared(SCHEDULES[name], rows)
        else:
            unet = _student(students, name, state, teacher)
            rows[name] |= _course(students / name) | _saved(teacher, unet, pairs)
        progress.report("times", number + 1, len(states))


def _show(pictures: dict[str, Tensor], prompts: Sequence[str], sheet: Path) -> None:
    """Some of the pictures, evenly, in a row for each who drew them."""
    from .plots.picture_rows import picture_rows_png

    places = torch.linspace(0, len(prompts) - 1, min(_SHOWN, len(prompts))).round().long()
    few = {name: each[places] for name, each in pictures.items()}
    write_whole(picture_rows_png(few, [prompts[place] for place in places.tolist()]), sheet)


def _runs(students: Path) -> list[tuple[str, str]]:
    """Names and states, schedules after what they need."""
    if not students.is_dir():
        raise BadInputError(f"{students} is no folder of students")
    states = (CUT, TRAINED)
    found = [
        (folder.name, state)
        for folder in sorted(students.iterdir(), key=_place)
        for state in states
        if (folder / state / "model_index.json").is_file()
    ]
    if not found:
        raise BadInputError(
            f"{students} has no students: each is a folder with {CUT} and {TRAINED} in it, models that `unet prune`, "
            "`combine` and `distil` wrote"
        )
    return [*found, *((name, TRAINED) for name in SCHEDULES if ("base", TRAINED) in found)]


def _place(folder: Path) -> tuple[int, str]:
    """The order of the source's tables, what it does not have behind."""
    known = [*PUBLISHED]
    return (known.index(folder.name) if folder.name in known else len(known)), folder.name


@contextlib.contextmanager
def _in_place(pipe: Any, students: Path, name: str, state: str, steps: int) -> Iterator[None]:
    """Inside, ``pipe`` draws with the student's UNet, or by a schedule."""
    from sd_lowvram.unets.evaluate import AT_ONCE
    from sd_lowvram.unets.schedule import scheduled

    own = pipe.unet
    if name not in SCHEDULES:
        try:
            pipe.register_modules(unet=_student(students, name, state, own))
            yield
        finally:
            pipe.register_modules(unet=own)
        return
    base = _student(students, "base", TRAINED, own)
    shares = SCHEDULES[name]
    first = round(steps * shares[0][1])
    takes = [own if who == _OWN else base for who, _ in shares]
    with scheduled(pipe, [(takes[0], first), (takes[1], steps - first)], batch=AT_ONCE, device="cpu"):
        yield


def _student(students: Path, name: str, state: str, teacher: Any) -> Any:
    from sd_lowvram.unets.checkpoints.load_unet import load_unet
    from sd_lowvram.unets.supervision import check_match

    unet = load_unet(students / name / state / "unet", teacher.dtype)
    check_match(teacher, unet)
    return unet


def _saved(teacher: Any, student: Any, pairs: int) -> dict[str, Any]:
    from sd_lowvram.unets.analysis import counted
    from sd_lowvram.unets.evaluate import step_times

    times = step_times(teacher, student, pairs)
    return {**counted(student), **{name: times[name] for name in _TIMES}}


def _shared(shares: Sequence[tuple[str, float]], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A step of a schedule, by the steps of those who share it, each beside the teacher's; the largest of them is what
    must have room."""
    whole = rows[_OWN]["seconds"]
    relative = sum(share * (1 if who == _OWN else 1 / rows[who]["ratio"]) for who, share in shares)
    operations = sum(share * rows[who]["operations"] for who, share in shares)
    largest = {name: max(rows[who][name] for who, _ in shares) for name in ("parameters", "bytes", "peak_bytes")}
    times = {"plain_seconds": whole, "seconds": whole * relative, "ratio": 1 / relative}
    return {**largest, "operations": operations, **times}


def _course(student: Path) -> dict[str, Any]:
    file = student / "course.json"
    return {"course": json.loads(file.read_text(encoding="utf-8"))} if file.is_file() else {}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """What :func:`run` found, as Markdown."""
    draw = report["draw"]
    yield "# Smaller UNets, trained: what they are worth, and what they save"
    yield ""
    yield (
        f"{draw['pictures']} pictures of {draw['steps']} steps in {report['dtype']}, guidance {draw['guidance']:g}, "
        "each beside the teacher's of the same seed, before training (*cut*) and after: PSNR, *difference* (mean, "
        "of 255). "
        "*Retrieved*: how many pictures' nearest training picture is their prompt's own. *Fréchet* distance and "
        "*score* over features of "
        f"{report['features']}, from the training pictures. *Step*: guided, on this CPU, {report['threads']} threads, "
        f"torch {report['torch']}, beside the teacher's in turn, medians of {report['pairs']} pairs of "
        f"{report['steps_timed']} steps; of schedules by the steps that each UNet takes. The teacher from other "
        "seeds is the yardstick: "
        "agreement below it says that the same thing was drawn, not the same picture. Published: FID, inception score "
        "and CLIP score of A-SDM 2023, SD1.5 on COCO."
    )
    yield ""
    yield (
        "What this table shows: what a cut saves, and that training brings a student that drew nothing of use back to "
        "drawing what it is asked for. What it cannot show is which student is better: the prompts are captions of the "
        "training pictures, and retrieval among these is no test where all pass it; each student was trained once, so "
        "that tenths of a dB between two mean nothing; where steps of training differ, so does what they are worth; "
        "and where students have a lower *Fréchet* distance than their teacher, that was not trained to its end."
    )
    yield ""
    heads = ["UNet", "parameters", "operations", "activations", "teacher's step", "step", "faster"]
    heads += ["cut", "retrieved", "trained", "difference", "retrieved", "Fréchet", "score", "steps of training"]
    yield from table([*heads, "published"], (_cells(row, report) for row in report["rows"]))


def _cells(row: dict[str, Any], report: dict[str, Any]) -> list[str]:
    name, whole, pictures = row["name"], report["rows"][0], report["draw"]["pictures"]
    few = min(_FEW, pictures)
    saved = ["-"] * 6
    if "ratio" in row:
        amounts = f"{row['parameters'] / 1e6:.2f} M", f"{row['operations'] / whole['operations']:.3f}"
        times = pair_cells(row, "{:.1f} ms", 1e-3)
        saved = [*amounts, format_size(row["peak_bytes"]), *times]
    drawn = _agreed(row.get(CUT), name, few), _agreed(row.get(TRAINED), name, pictures)
    after = row.get(TRAINED)
    rest = ["-"] * 3
    if after:
        rest = [f"{after['difference']:.2f}", f"{after['frechet']:.3f}", f"{after['score']:.1f}"]
    course = str(row["course"]["steps"]) if "course" in row and after else "-"
    return [
        name, *saved, *drawn[0], drawn[1][0], rest[0], drawn[1][1], *rest[1:], course, PUBLISHED.get(name, "-")
    ]  # fmt: skip


def _agreed(found: dict[str, float] | None, name: str, pictures: int) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    psnr = "-" if name == _OWN else f"{found['psnr']:.1f} dB"
    return psnr, f"{round(found['retrieved'] * pictures)} of {pictures}"
