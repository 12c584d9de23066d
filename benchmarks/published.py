"""Times that plans foretell beside times that were published for the same pictures, size by size.

The published ones hold what a plan does not: the program around the model, and the picture's way into a file. That is
one number for all sizes, fitted to the squares; the sizes that are no squares then judge the time model.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

import torch

from sd_lowvram import progress
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import profile
from sd_lowvram.files.tables import table
from sd_lowvram.files.whole import write_json
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB

from .tables import begun, written

_FOLDER = Path(__file__).parent / "published_times"
PUBLISHED = ("basujindal-turbo", "consciencia-turbo", "consciencia-modified")
"""The matrices that are here, by the policy that they are of."""

_SAMPLES = 20
_WORST = 5
"""So many of the sizes that are farthest off are told."""
_RAM = 32 * GIB

Size = tuple[int, int]
"""Height and width of a picture."""


class Planned(NamedTuple):
    """Seconds of a plan: on the card, and of a decode on the processor, whose speed is assumed."""

    on_card: float
    on_processor: float


@dataclass(frozen=True)
class Agreement:
    """Foretold times beside published ones, of the sizes that are no squares.

    Attributes:
        median_error, worst_tenth_error: of the size of the relative error; a tenth of the sizes is beyond the second.
        r_squared: share of the published times' variance that the foretold ones explain.
    """

    sizes: int
    median_error: float
    worst_tenth_error: float
    r_squared: float


@dataclass(frozen=True)
class Comparison:
    """Seconds by size.

    Attributes:
        fixed_seconds: what a picture takes besides its plan, fitted to the squares; part of ``foretold``.
        decode_share: of the time that a plan assumes for a decode on a processor, fitted to them too; None: the
            decoder is on the card.
    """

    fixed_seconds: float
    decode_share: float | None
    published: dict[Size, float]
    foretold: dict[Size, float]
    agreement: Agreement


def run(names: Iterable[str] = PUBLISHED, *, out: Path | None) -> dict[str, Any]:
    """Compare plans by the policies ``names`` on the RTX 2070's profile with the 169 published times of each.

    Takes some minutes each; writes ``out`` and JSON beside it, policy by policy, and goes on with those that lack.
    """
    report = begun({"model": "sd15", "card": "rtx2070", "steps": _SAMPLES}, out)
    known = [row["policy"] for row in report["rows"]]
    for name in [name for name in names if name not in known]:
        published = published_times(name)
        report["rows"].append(_as_row(name, compared(published, planned_times(name, published))))
        if out is not None:
            write_json(report, out.with_suffix(".json"))
    return written(report, lines, out)


def published_times(name: str) -> dict[Size, float]:
    """Seconds by size of the picture, as the file ``name`` has them."""
    with open(_FOLDER / f"{name}.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [column for column in rows[0] if column != "height"]
    return {
        (int(row["height"]), int(column.removeprefix("width_"))): float(row[column])
        for row in rows
        for column in columns
    }


def planned_times(name: str, sizes: Iterable[Size]) -> dict[Size, Planned]:
    """Seconds of plans by the policy ``name`` for an RTX 2070 with 8 GB, in fp16 as the published pictures were made.

    A picture on its side takes as long as upright. Guidance is planned together: the profile's time of a launch was
    fitted to a program that has it in turn, whose launches it so holds already.
    """
    sizes = list(sizes)
    anatomy, card = meta_anatomy("sd15", torch.float16), profile("rtx2070")
    chosen, found = dataclasses.replace(Settings.policy(name), guidance_in_turn=False), {}
    for size in progress.counted("sizes", sorted({(min(size), max(size)) for size in sizes})):
        height, width = size
        request = request_for(
            anatomy,
            vram=card.vram_bytes,
            ram=_RAM,
            width=width,
            height=height,
            steps=_SAMPLES,
            device="cuda",
            rates=card,
        )
        plan = make_plan(anatomy, request, chosen)
        away = sum(stage.seconds for stage in plan.stages if stage.name == "decode" and chosen.decoder_device == "cpu")
        found[size] = Planned(plan.predicted.seconds - away, away)
    return {size: found[min(size), max(size)] for size in sizes}


def compared(published: dict[Size, float], planned: dict[Size, Planned]) -> Comparison:
    """``planned`` with the fixed part that brings its squares nearest to the published ones, by relative error.

    Where the decoder is on the processor, that one's speed, of which a card's profile tells nothing, is fitted besides.
    """
    squares = [size for size in published if size[0] == size[1]]
    away = any(one.on_processor for one in planned.values())
    weights = torch.tensor([1 / published[size] for size in squares], dtype=torch.float64)
    columns = [[1.0, planned[size].on_processor] if away else [1.0] for size in squares]
    left = torch.tensor([published[size] - planned[size].on_card for size in squares], dtype=torch.float64)
    system = torch.tensor(columns, dtype=torch.float64) * weights[:, None]
    fixed, *share = torch.linalg.lstsq(system, (left * weights)[:, None], driver="gelsd").solution[:, 0].tolist()
    decode_share = share[0] if share else None
    foretold = {size: fixed + one.on_card + (decode_share or 0.0) * one.on_processor for size, one in planned.items()}
    return Comparison(fixed, decode_share, published, foretold, _agreement(published, foretold))


def _agreement(published: dict[Size, float], foretold: dict[Size, float]) -> Agreement:
    others = [size for size in published if size[0] != size[1]]
    errors = [abs(foretold[size] / published[size] - 1) for size in others]
    mean = fmean(published[size] for size in others)
    left = sum((foretold[size] - published[size]) ** 2 for size in others)
    variance = sum((published[size] - mean) ** 2 for size in others)
    return Agreement(len(others), median(errors), quantiles(errors, n=10)[-1], 1 - left / variance)


def _as_row(name: str, found: Comparison) -> dict[str, Any]:
    times = [
        {"height": size[0], "width": size[1], "published": one, "foretold": round(found.foretold[size], 3)}
        for size, one in found.published.items()
    ]
    fitted = {"fixed_seconds": found.fixed_seconds, "decode_share": found.decode_share}
    told = {**fitted, "agreement": asdict(found.agreement), "times": times}
    return {"policy": name, **told}


def ratios(row: dict[str, Any]) -> dict[Size, float]:
    """Seconds foretold over published by size, of a report's row."""
    return {(time["height"], time["width"]): time["foretold"] / time["published"] for time in row["times"]}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """What agrees and what does not, and for each policy seconds foretold and published, height by width."""
    yield "# Times foretold beside published ones"
    yield ""
    yield (
        f"SD1.5 on an RTX 2070, {report['steps']} samples with guidance, seconds of a picture. The profile's launches "
        "are fitted to the 13 squares of consciencia-modified; to those of each policy a fixed part of a picture, and "
        "where the decoder is on the processor what share its decode takes of the time that plans assume. The "
        "errors and R^2 are of the other sizes. Where the published times come from: "
        "`benchmarks/published_times/README.md`."
    )
    yield ""
    heads = (
        "policy",
        "fixed s",
        "decode share",
        "other sizes",
        "median error",
        "a tenth beyond",
        "R^2",
        "worst: foretold / published",
    )
    yield from table(heads, map(_agreement_cells, report["rows"]))
    for row in report["rows"]:
        yield ""
        yield f"## {row['policy']}: foretold / published"
        yield ""
        yield from _matrix(row)


def _agreement_cells(row: dict[str, Any]) -> list[str]:
    one, far = row["agreement"], ratios(row)
    worst = sorted(far, key=lambda size: abs(far[size] - 1), reverse=True)[:_WORST]
    told = ", ".join(f"{height}x{width} {far[height, width]:.2f}" for height, width in worst)
    errors = [f"{one['median_error']:.1%}", f"{one['worst_tenth_error']:.1%}", f"{one['r_squared']:.3f}"]
    share = "" if row["decode_share"] is None else f"{row['decode_share']:.2f}"
    return [row["policy"], f"{row['fixed_seconds']:.2f}", share, str(one["sizes"]), *errors, told]


def _matrix(row: dict[str, Any]) -> Iterator[str]:
    cells = {(one["height"], one["width"]): f"{one['foretold']:.1f} / {one['published']:.1f}" for one in row["times"]}
    heights, widths = (sorted({size[side] for size in cells}) for side in (0, 1))
    rows = ([str(height), *(cells[height, width] for width in widths)] for height in heights)
    yield from table(("height", *map(str, widths)), rows)
