"""Predicted times compared with published ones for the same work, size by size and GPU by GPU.

Predictions are those of `sd-lowvram plan --policy NAME --gpu CARD`. A second prediction uses figures that are fitted to
the other programs, or to the other GPUs, alone.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch

from sd_lowvram import progress
from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.devices.performance import Rates, profile
from sd_lowvram.files import table
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.search import PlanSearch, best_plan
from sd_lowvram.settings import Settings
from sd_lowvram.tracing.tracer import Figures
from sd_lowvram.units import GIB

from .max_size import PUBLISHED as LARGEST
from .tables import written

_FOLDER = Path(__file__).parent / "published_times"
PUBLISHED = ("basujindal-turbo", "consciencia-turbo", "consciencia-modified")
"""The matrices that are here, by the policy that they are of."""

_CARD, _SAMPLES, _WORST = "rtx2070", 20, 5
_RAM = 32 * GIB
_ROUNDS, _NEAR = 12, 1e-3
_PROCESSOR_BY_ITS_MAKER = 0.6 * 8 * 32 * 3.6e9
"""Operations a second of an i7-9700K: cores, operations of a cycle, cycles, and the share of fp32 of the cards."""

REACHED = [*((name, *of) for name, of in LARGEST.items()), ("basujindal", 448, 21.1)]
"""Policies, sides and seconds of squares beside the matrices: the largest in 8 GB, and the mean of 30 pictures."""

_NEAR_ENOUGH = 0.1

_PLAIN = Settings.policy("diffusers-default")
_KINDS = {"full": dataclasses.replace(_PLAIN, attention="sliced", attention_mib=65536), "memory_efficient": _PLAIN}
"""Columns of diffusers' page, and settings with that kind of attention."""

_anatomy = functools.cache(lambda: meta_anatomy("sd15", torch.float16))

Size = tuple[int, int]
"""Height and width of a picture."""


@dataclass(frozen=True)
class PredictedTimes:
    """A plan, and the work that its time is of.

    Attributes:
        parts: calls of a stage on the card, and what one does.
        away: operations of what runs on the processor.
    """

    plan: Plan
    parts: list[tuple[int, Figures]]
    away: int

    @property
    def seconds(self) -> float:
        return self.plan.predicted.seconds

    def by(self, rates: Rates) -> float:
        """Seconds that the plan would say of a card with these rates."""
        return self.seconds + self._worked(rates) - self._worked(self.plan.request.rates)

    def _worked(self, rates: Rates) -> float:
        here = sum(calls * rates.seconds(figures, 2) for calls, figures in self.parts)
        return here + self.away / rates.processor_flops


@dataclass(frozen=True)
class Agreement:
    """Agreement of predicted and published times.

    Attributes:
        median_error, worst_tenth_error: median of the absolute relative error, and the value that a tenth exceeds.
        r_squared: share of the published times' variance that the predicted ones explain.
    """

    sizes: int
    median_error: float
    worst_tenth_error: float
    r_squared: float


def run(names: Iterable[str] = PUBLISHED, *, out: Path | None) -> dict[str, Any]:
    """Compare plans by the policies ``names`` for the RTX 2070 with the 169 published times of each, and steps on seven
    cards with their 14 published speeds.

    Takes some minutes.
    """
    published = {name: published_times(name) for name in names}
    predicted = {name: predicted_times(name, sizes) for name, sizes in published.items()}
    report: dict[str, Any] = {"model": "sd15", "card": _CARD, "steps": _SAMPLES}
    report["rows"] = [_as_row(name, published[name], predicted[name]) for name in published]
    errors = [abs(ratio - 1) for row in report["rows"] for ratio in ratios(row).values()]
    report["median_error"] = median(errors)
    report["left_out"] = [_left_out(name, published, predicted) for name in published if len(published) > 1]
    report["reached"] = reached()
    report["speeds"] = speeds()
    return written(report, lines, out)


# Pictures on the RTX 2070


def published_times(name: str) -> dict[Size, float]:
    """Seconds by size of the picture, as the file ``name`` has them."""
    rows = _rows(name)
    columns = [column for column in rows[0] if column != "height"]
    return {
        (int(row["height"]), int(column.removeprefix("width_"))): float(row[column])
        for row in rows
        for column in columns
    }


def _rows(name: str) -> list[dict[str, str]]:
    with open(_FOLDER / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def predicted_times(name: str, sizes: Iterable[Size]) -> dict[Size, PredictedTimes]:
    """Predicted seconds for the RTX 2070 by the policy ``name``, in fp16 like the published pictures.

    Landscape and portrait take equally long.
    """
    sizes, found = list(sizes), {}
    for height, width in progress.report_each("sizes", sorted({(min(size), max(size)) for size in sizes})):
        shape = {"width": width, "height": height, "steps": _SAMPLES}
        found[height, width] = _predicted(name, Settings.policy(name), _CARD, **shape)
    return {size: found[min(size), max(size)] for size in sizes}


def _predicted(name: str, settings: Settings, gpu: str, **shape: Any) -> PredictedTimes:
    anatomy = _anatomy()
    search = PlanSearch(anatomy, request_by(name, anatomy, gpu=gpu, ram=_RAM, **shape), settings, approximate=False)
    plan, costs = best_plan(search), search.pricing.costs
    parts, away = [], 0
    for stage, told in zip(costs.stages, plan.stages, strict=True):
        traced = search.pricing.as_traced(stage, plan.settings)
        if told.activation_bytes:
            parts.append((plan.request.steps if stage.repeats else 1, costs(stage, traced)))
        else:
            away += costs(stage, dataclasses.replace(traced, precision="fp32")).flops
    return PredictedTimes(plan, parts, away)


def reached() -> list[dict[str, Any]]:
    """Published and predicted seconds of pictures that no figure was fitted to."""
    return [
        {
            "policy": name,
            "side": side,
            "published": seconds,
            "predicted": predicted_times(name, [(side, side)])[side, side].seconds,
        }
        for name, side, seconds in progress.report_each("largest pictures", REACHED)
    ]


def agreement(published: Mapping[Size, float], predicted: Mapping[Size, float]) -> Agreement:
    errors = [abs(predicted[size] / seconds - 1) for size, seconds in published.items()]
    mean = fmean(published.values())
    left = sum((predicted[size] - seconds) ** 2 for size, seconds in published.items())
    variance = sum((seconds - mean) ** 2 for seconds in published.values())
    return Agreement(len(errors), median(errors), quantiles(errors, n=10)[-1], 1 - left / variance)


def _as_row(name: str, published: dict[Size, float], predicted: Mapping[Size, PredictedTimes]) -> dict[str, Any]:
    seconds = {size: one.seconds for size, one in predicted.items()}
    times = [
        {"height": size[0], "width": size[1], "published": one, "predicted": round(seconds[size], 3)}
        for size, one in published.items()
    ]
    return {"policy": name, "agreement": asdict(agreement(published, seconds)), "times": times}


def _left_out(
    name: str, published: Mapping[str, Mapping[Size, float]], predicted: Mapping[str, Mapping[Size, PredictedTimes]]
) -> dict[str, Any]:
    """Times by the policy ``name``, by figures that are fitted to the squares of the other policies alone.

    A processor that no other policy decodes on is described by its maker.
    """
    others = [(one, size) for one in published if one != name for size in published[one] if size[0] == size[1]]
    decodes = any(predicted[one][size].away for one, size in others)

    def rates(one: PredictedTimes, factors: Sequence[float]) -> Rates:
        known = one.plan.request.rates
        flops, launch, processor = factors
        return dataclasses.replace(
            known,
            half_flops=flops * known.half_flops,
            launch_seconds=launch * known.launch_seconds,
            processor_flops=processor * known.processor_flops if decodes else _PROCESSOR_BY_ITS_MAKER,
        )

    def misses(factors: Sequence[float]) -> list[float]:
        told = ((predicted[one][size], published[one][size]) for one, size in others)
        return [math.log(one.by(rates(one, factors)) / seconds) for one, seconds in told]

    factors = fitted(misses, 3)
    seconds = {size: one.by(rates(one, factors)) for size, one in predicted[name].items()}
    return {"policy": name, "factors": factors, "agreement": asdict(agreement(published[name], seconds))}


def fitted(misses: Callable[[Sequence[float]], list[float]], count: int) -> list[float]:
    """The ``count`` factors, from 1 on, whose ``misses`` have the least sum of squares: Gauss-Newton, in logs."""
    place = torch.zeros(count, dtype=torch.float64)

    def at(logs: torch.Tensor) -> torch.Tensor:
        return torch.tensor(misses(logs.exp().tolist()), dtype=torch.float64)

    for _ in range(_ROUNDS):
        now, axes = at(place), _NEAR * torch.eye(count, dtype=torch.float64)
        slopes = torch.stack([(at(place + axis) - now) / _NEAR for axis in axes], dim=1)
        step = torch.linalg.lstsq(slopes, -now[:, None], driver="gelsd").solution[:, 0]
        place = place + step.clamp(-0.5, 0.5)
    return place.exp().tolist()


def ratios(row: dict[str, Any]) -> dict[Size, float]:
    """Predicted over published seconds by size, of a report's row."""
    return {(time["height"], time["width"]): time["predicted"] / time["published"] for time in row["times"]}


# Steps on seven cards


def speeds() -> list[dict[str, Any]]:
    """Guided steps a second by card, with all scores of attention and without: published, by plans, and by the shares
    of makers' figures that the other cards say."""
    published = {row["card"]: {kind: float(row[kind]) for kind in _KINDS} for row in _rows("diffusers_page")}
    steps = {
        card: {
            kind: _predicted("diffusers-default", settings, card, width=512, height=512)
            for kind, settings in _KINDS.items()
        }
        for card in published
    }

    def by(card: str, kind: str, factors: Sequence[float]) -> float:
        rates, (_, figures) = profile(card), max(steps[card][kind].parts, key=lambda part: part[0])
        flops, memory, launch = factors
        other = dataclasses.replace(
            rates,
            half_flops=flops * rates.half_flops,
            bandwidth=memory * rates.bandwidth,
            launch_seconds=launch * rates.launch_seconds,
        )
        return 1 / other.seconds(figures, 2)

    def row_of(card: str, kind: str) -> dict[str, Any]:
        others = [(one, way) for one in published if one != card for way in _KINDS]
        factors = fitted(lambda tried: [math.log(by(*one, tried) / published[one[0]][one[1]]) for one in others], 3)
        stage = next(stage for stage in steps[card][kind].plan.stages if stage.name == "denoise")
        told = {
            "predicted": steps[card][kind].plan.request.steps / stage.seconds,
            "by_the_others": by(card, kind, factors),
        }
        return {"card": card, "attention": kind, "published": published[card][kind], **told}

    return [row_of(card, kind) for card in progress.report_each("cards", list(published)) for kind in _KINDS]


def out_of_order(rows: Sequence[dict[str, Any]], told: str) -> list[str]:
    """Pairs of cards that ``told`` orders the other way round than what was published, by kind of attention."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        same = one["attention"] == other["attention"]
        if same and (one["published"] - other["published"]) * (one[told] - other[told]) < 0:
            found.append(f"{one['card']} and {other['card']} ({one['attention'].replace('_', '-')})")
    return found


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Agreement, then for each policy predicted and published seconds, height by width."""
    yield "# Predicted times next to published ones"
    yield ""
    yield (
        f"SD1.5 on an RTX 2070, {report['steps']} samples with guidance, seconds of a picture as `sd-lowvram plan "
        f"--model sd15 --gpu {report['card']} --policy NAME` says them. What the programs take over a launch and "
        "over an operation, and the processor's operations, are three numbers, fitted to the 39 squares among the 507 "
        "sizes; the card is described by its maker's figures, like all cards. "
        "*Left out*: the same three by the squares of the other two policies (the processor's by its maker, where none "
        "of them decodes there). "
        "Written by `python -m benchmarks published`; where the published times come from: "
        "`benchmarks/published_times/README.md`."
    )
    yield ""
    yield f"Median error of all sizes: {report['median_error']:.1%}."
    yield ""
    heads = "policy", "sizes", "median error", "a tenth beyond", "R^2", "left out: median error", "a tenth beyond"
    left_out = {row["policy"]: row["agreement"] for row in report["left_out"]}
    yield from table(
        (*heads, "worst: predicted / published"), (_agreement_cells(row, left_out) for row in report["rows"])
    )
    yield from _reached_lines(report["reached"])
    yield from _speed_lines(report["speeds"])
    for row in report["rows"]:
        yield ""
        yield f"## {row['policy']}: predicted / published"
        yield ""
        yield from _matrix(row)


def _agreement_cells(row: dict[str, Any], left_out: Mapping[str, dict[str, Any]]) -> list[str]:
    one, far = row["agreement"], ratios(row)
    worst = sorted(far, key=lambda size: abs(far[size] - 1), reverse=True)[:_WORST]
    told = ", ".join(f"{height}x{width} {far[height, width]:.2f}" for height, width in worst)
    errors = [f"{one['median_error']:.1%}", f"{one['worst_tenth_error']:.1%}", f"{one['r_squared']:.3f}"]
    without = left_out.get(row["policy"])
    errors += [f"{without['median_error']:.1%}", f"{without['worst_tenth_error']:.1%}"] if without else ["", ""]
    return [row["policy"], str(one["sizes"]), *errors, told]


def _reached_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield "## Pictures beside the matrices"
    yield ""
    yield (
        "The largest square of each program in the 8 GB of the RTX 2070, and the mean of 30 pictures of 448x448 by "
        "basujindal without --turbo. No figure was fitted to them. Those that are more than a tenth off are not "
        "explained. Two things are not in a plan and may be a part of it: at the card's limit Windows moves memory of "
        "the GPU into RAM, and basujindal without --turbo moves halves of its UNet from memory that is not "
        "page-locked, while the GPU waits."
    )
    yield ""
    heads = ("policy", "picture", "published, s", "predicted, s", "predicted over published", "within a tenth")
    yield from table(heads, map(_reached_cells, rows))


def _reached_cells(row: dict[str, Any]) -> list[str]:
    ratio = row["predicted"] / row["published"]
    side, near = f"{row['side']}x{row['side']}", abs(ratio - 1) <= _NEAR_ENOUGH
    cells = [f"{row['published']:.1f}", f"{row['predicted']:.1f}", f"{ratio:.2f}"]
    return [row["policy"], side, *cells, "yes" if near else "no, not explained"]


def _speed_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield ""
    yield "## Guided steps a second, by card"
    yield ""
    yield (
        "SD1.5 at 512x512 in fp16, attention with all its scores (`--policy diffusers-default --attention sliced "
        "--attention-mib 65536`) and memory-efficient (`--policy diffusers-default`). *Predicted*: by plans, whose "
        "three numbers are fitted to these 14 speeds. *By the others*: by three that are fitted to the other six "
        "cards. Two cards' matrix work is not of their sheets: the T4's is the TITAN RTX's by watts, the A10G's the "
        "A10's. With all scores the TITAN RTX was faster than the A6000, of which the maker states more operations and "
        "more bytes a second: these two stay in the other order."
    )
    yield ""
    yield from table(
        ("card", "attention", "published", "predicted", "error", "by the others", "error"), map(_speed, rows)
    )
    for told, name in (("predicted", "Predicted"), ("by_the_others", "By the others")):
        pairs = out_of_order(rows, told)
        yield ""
        yield f"{name}, pairs of cards in the wrong order: {'; '.join(pairs) or 'none'}."


def _speed(row: dict[str, Any]) -> list[str]:
    cells = [row["card"], row["attention"].replace("_", "-"), f"{row['published']:g}"]
    for told in ("predicted", "by_the_others"):
        cells += [f"{row[told]:.1f}", f"{row[told] / row['published'] - 1:+.0%}"]
    return cells


def _matrix(row: dict[str, Any]) -> Iterator[str]:
    cells = {(one["height"], one["width"]): f"{one['predicted']:.1f} / {one['published']:.1f}" for one in row["times"]}
    heights, widths = (sorted({size[side] for size in cells}) for side in (0, 1))
    rows = ([str(height), *(cells[height, width] for width in widths)] for height in heights)
    yield from table(("height", *map(str, widths)), rows)
