"""Charts of measurements, each with a claim that the figures confirm or refute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sd_lowvram.units import GIB, MIB

from .. import max_size, variance, warmup
from ..end_to_end import PEAK_TOLERANCE, cases, device_bytes
from ..fits import polynomial
from ..matrix import seconds_by_size, title
from ..peers import AMPLE, LEAST, OURS
from ..plots.bars import bars
from ..plots.curves import Series, curves
from ..plots.grid import grid
from ..plots.heat_map import heat_map
from ..published import PUBLISHED, published_times, ratios
from ..same import PLAIN
from ..steps import is_line
from ..tables import trusted

Report = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A matplotlib Figure, what it was drawn to show, whether it does, and where it is known why not."""

    name: str
    figure: Any
    claim: str
    holds: bool
    why: str = ""

    @property
    def verdict(self) -> str:
        return f"Shown: {self.claim}." if self.holds else f"NOT shown by these figures: {self.claim}."


def same_charts(report: Report) -> list[Chart]:
    names = report["policies"]
    cells = {}
    for pair in [*report["pairs"], *report["again"]]:
        word = "bits" if pair["bits"] else str(pair["most"])
        cell = (word, 0.0 if pair["bits"] else min(1.0, 0.15 + pair["most"] / 16))
        cells[pair["of"][0], pair["of"][1]] = cells[pair["of"][1], pair["of"][0]] = cell
    plain = [pair for pair in report["pairs"] if PLAIN in pair["of"]]
    drawn = grid("Largest difference of 8-bit values, of 255", names, cells)
    close = all(pair["most"] <= 1 for pair in plain)
    return [
        Chart("same", drawn, "by every policy the picture is that of the untouched pipeline within 1 of 255", close)
    ]


def steps_charts(report: Report) -> list[Chart]:
    counts, series = report["counts"], {}
    for row in report["rows"]:
        line = polynomial(counts, row["seconds"], 1)
        series[row["policy"]] = Series(counts, row["seconds"], line.at if line else None)
    straight = all(row["r_squared"] >= 0.98 for row in report["rows"])
    slopes = {row["policy"]: 1000 * row["slope"] for row in report["rows"] if is_line(row)}
    fastest = len(slopes) == len(series) and slopes.get("ours", 0) <= 1.05 * min(slopes.values())
    return [
        Chart("steps", curves("Seconds of a picture by its steps", series, "steps", "s"),
              "time is a line in the steps, R^2 at least 0.98", straight),
        Chart("slopes", bars("Time of a step", list(slopes), {"here": list(slopes.values())}, "ms"),
              "no policy's step is more than 5 % faster than ours where memory is ample", fastest),
    ]  # fmt: skip


def variance_charts(report: Report) -> list[Chart]:
    names = [row["policy"] for row in report["rows"]]
    here = {row["policy"]: 100 * row["variation"] for row in report["rows"]}
    there = [100 * variance.PUBLISHED[name][1] if name in variance.PUBLISHED else None for name in names]
    series = {"here": [here[name] for name in names], "published, RTX 2070": there}
    steady = _quiet(report) and here.get("ours", 0) <= 100 * max(one for _, one in variance.PUBLISHED.values())
    drawn = bars("Coefficient of variation of equal pictures", names, series, "%")
    return [Chart("variance", drawn, "ours varies no more than the forks did in the published runs", steady)]


def warmup_charts(report: Report) -> list[Chart]:
    rows = [row for row in report["rows"] if "error" not in row]
    names = [row["policy"] for row in rows]
    series = {
        "all": [row["first_beyond"] for row in rows],
        "first step": [row.get("step_beyond") for row in rows],
        "first decode": [row.get("decode_beyond") for row in rows],
    }
    less = _quiet(report) and all(row["first_beyond"] < min(warmup.PUBLISHED.values()) for row in rows)
    drawn = bars("The first picture beyond the median of the next ones", names, series, "s")
    return [Chart("warmup", drawn, "the first picture takes less beyond the others than the published 4.3 s", less)]


def largest_charts(report: Report) -> list[Chart]:
    rows = [row for row in report["rows"] if row.get("side")]
    names = [row["policy"] for row in rows]
    sides = {row["policy"]: row["side"] for row in rows}
    drawn = bars(
        f"Side of the largest square within {report['cap'] / MIB:.0f} MiB", names, {"here": [*sides.values()]}, "pixels"
    )
    confirmed = bool(rows) and all(row["one_more_fails"] for row in rows)
    charts = [
        Chart("largest", drawn, "each largest size was run, and one size more was run and did not fit", confirmed)
    ]
    if "ours" in sides:
        beyond = all(sides["ours"] > side for name, side in sides.items() if name != "ours")
        speed = bars("Time of that picture", names, {"here": [row["seconds"] for row in rows]}, "s")
        charts.append(Chart("largest-time", speed, "ours draws larger pictures than every other policy", beyond))
    return charts


def foretold_charts(report: Report) -> list[Chart]:
    rows = [row for row in report["rows"] if row["side"]]
    names = [row["policy"] for row in rows]
    published = [max_size.PUBLISHED.get(name, (None, None)) for name in names]
    sides = {"foretold": [row["side"] for row in rows], "published": [side for side, _ in published]}
    seconds = {
        "foretold": [_per_megapixel(row, row["side"]) for row in rows],
        "published": [_per_megapixel({"seconds": one}, side) if side else None for side, one in published],
    }
    ours = {row["policy"]: row["side"] for row in rows}.get("ours", 0)
    beyond = all(ours > side for side, _ in max_size.PUBLISHED.values())
    nearest = all(
        side is None or abs(row["side"] / side - 1) <= 0.15 for row, (side, _) in zip(rows, published, strict=True)
    )
    return [
        Chart("side", bars("Side of the largest square of SD1.5 in 8 GB", names, sides, "pixels"),
              "ours is foretold to draw larger pictures than the published largest", beyond),
        Chart("pace", bars("Time a megapixel of that picture", names, seconds, "s"),
              "the largest sizes foretold of the policies are within 15 % of the published ones", nearest,
              "Plans have all of the card's memory, of which Windows 10 took a part in the published runs, and bound "
              "attention's parts at 32 MiB, where the forks take one head at any size."),
    ]  # fmt: skip


def matrix_charts(report: Report) -> list[Chart]:
    seconds = seconds_by_size(report)
    pairs = [(seconds[size], seconds[size[1], size[0]]) for size in seconds if size[0] < size[1]]
    ratios = [one / other for one, other in pairs if one and other]
    alike = all(1 / 1.15 <= ratio <= 1.15 for ratio in ratios)
    claim = "a picture on its side takes as long as upright, within 15 %"
    return [Chart("matrix", heat_map(title(report), seconds), claim, alike)]


def fit_charts(report: Report) -> list[Chart]:
    series = {}
    for name in PUBLISHED:
        times = published_times(name)
        pixels = [height * width / 1e6 for height, width in times]
        curve = polynomial(pixels, list(times.values()), 2)
        series[name] = Series(pixels, list(times.values()), curve.at if curve else None)
    drawn = curves("Published on an RTX 2070: pixels against time", series, "megapixels", "s")
    fits = [row["all"]["r_squared"] for row in report["rows"] if row["all"]]
    grows = {row["matrix"]: row["all"]["r_squared"] for row in report["rows"] if row["all"]}
    explained = bars("R^2 of the second-order polynomials", list(grows), {"all sizes": [*grows.values()]}, "")
    return [
        Chart("fit", drawn, "polynomials of the second order explain the published times, R^2 at least 0.95",
              all(one >= 0.95 for one in list(grows.values())[: len(PUBLISHED)])),
        Chart("fit-here", explained, "so they do for all matrices, this machine's too",
              all(one >= 0.95 for one in fits)),
    ]  # fmt: skip


def published_charts(report: Report) -> list[Chart]:
    rows = report["rows"]
    points = {
        row["policy"]: Series([one["published"] for one in row["times"]], [one["foretold"] for one in row["times"]])
        for row in rows
    }
    scatter = curves("Seconds of a picture, RTX 2070", points, "published, s", "foretold, s", equal=True)
    near = report["median_error"] <= 0.1 and all(row["agreement"]["median_error"] <= 0.15 for row in rows)
    claim = "the median error is at most 10 % over all sizes and 15 % for every policy, as plans say it to users"
    maps = []
    for row in rows:
        within = all(0.8 <= ratio <= 1.25 for ratio in ratios(row).values())
        drawn = heat_map(row["policy"], dict(ratios(row)), "foretold over published", ratios=True)
        told = f"no time by {row['policy']} is foretold more than a quarter off"
        maps.append(Chart(f"ratio-{row['policy']}", drawn, told, within))
    return [Chart("scatter", scatter, claim, near), *maps]


def cards_charts(report: Report) -> list[Chart]:
    names = [row["title"] for row in report["rows"]]
    sides = sorted({cell["side"] for row in report["rows"] for cell in row["cells"]})
    ours = {
        side: [
            cell for row in report["rows"] for cell in row["cells"] if (cell["side"], cell["policy"]) == (side, "ours")
        ]
        for side in sides
    }
    pixels = {f"{side}x{side}": [_per_megapixel(cell, side) for cell in ours[side]] for side in sides}
    seconds = bars("SD1.5 by ours, foretold: seconds a megapixel, 20 steps", names, pixels, "s")
    fits = all("seconds" in cell for cells in ours.values() for cell in cells)
    peaks = {
        f"{side}x{side}": [cell["peak_bytes"] / GIB if "seconds" in cell else None for cell in ours[side]]
        for side in sides
    }
    memory = bars("SD1.5 by ours, foretold: peak", names, peaks, "GiB")
    within = all(
        cell["peak_bytes"] <= row["vram_bytes"] for row in report["rows"] for cell in row["cells"] if "seconds" in cell
    )
    largest = f"{sides[-1]}x{sides[-1]}"
    return [
        Chart("seconds", seconds, f"plans foretell that ours draws {largest} on each of these cards", fits),
        Chart("peaks", memory, "no foretold peak is beyond its card's memory", within),
    ]


def _quiet(report: Report, spread: str = "ratio_spread") -> bool:
    """True if no row was measured on a busy machine."""
    return all(trusted(row, spread) for row in report["rows"])


def _per_megapixel(cell: Report, side: int) -> float | None:
    return cell["seconds"] / (side * side / 1e6) if "seconds" in cell else None


def end_to_end_charts(report: Report) -> list[Chart]:
    charts = []
    for model, case in cases(report):
        rows = case["rows"]
        names = [f"budget {row['budget'] / MIB:.0f} MiB" for row in rows]
        held = {part: [row[part]["held_bytes"] / MIB for row in rows] for part in ("planned", "measured")}
        device = {
            "budget": [row["budget"] / MIB for row in rows],
            "planned": [row["planned"]["peak_bytes"] / MIB for row in rows],
            "run": [device_bytes(row["planned"], row["measured"]) / MIB for row in rows],
        }
        drawn = bars(f"{model}: peak on the device, beside the budget", names, device, "MiB")
        near = all(abs(one / two - 1) <= PEAK_TOLERANCE for one, two in zip(*held.values(), strict=True))
        claim = f"what a run of {model} held was foretold within {PEAK_TOLERANCE:.0%} at every budget"
        why = "" if near else "The allocator of a CPU knows one account: what waits in host memory is in what it held."
        charts.append(Chart(f"memory-{model}", drawn, claim, near, why))
    return charts


def peers_charts(report: Report) -> list[Chart]:
    rows = {row["name"]: row for row in report["rows"] if "error" not in row}
    figures = {
        "tensors": [row["allocator_bytes"] / MIB for row in rows.values()],
        "process": [None if row["process_bytes"] is None else row["process_bytes"] / MIB for row in rows.values()],
    }
    memory = bars("Peak beyond what was there before the model", list(rows), figures, "MiB")
    times = [row["seconds"] if trusted(row, "spread") else None for row in rows.values()]
    seconds = bars("Time of the picture", list(rows), {"here": times}, "s")
    others = [row for name, row in rows.items() if name not in OURS]
    least = rows.get(LEAST)
    lower = least is not None and all(least["allocator_bytes"] < row["allocator_bytes"] for row in others)
    ample = rows.get(AMPLE)
    fast = (
        ample is not None
        and _quiet(report, "spread")
        and all(ample["seconds"] <= 1.05 * row["seconds"] for row in others)
    )
    return [
        Chart("peak", memory, "with the least memory ours has the lowest peak of all tensors", lower),
        Chart("time", seconds, "no peer is more than 5 % faster than ours where memory is ample", fast),
    ]


def ladder_charts(report: Report) -> list[Chart]:
    rows = report["rows"]
    series = {"here": [row["ratio"] for row in rows], "published": [row["published"] for row in rows]}
    drawn = bars("Times as fast as at first", [row["name"] for row in rows], series, "")
    own = [row["ratio"] for row in rows if row["published"] is None]
    theirs = [row["ratio"] for row in rows if row["published"] is not None]
    faster = _quiet(report) and bool(own) and max(own) > max(theirs)
    return [Chart("ladder", drawn, "one of our rungs is faster here than all of the source's", faster)]


CHARTS: dict[str, Callable[[Report], list[Chart]]] = {
    "same": same_charts,
    "steps": steps_charts,
    "variance": variance_charts,
    "warmup": warmup_charts,
    "largest": largest_charts,
    "largest_demo": largest_charts,
    "largest_demo_16": largest_charts,
    "matrix": matrix_charts,
    "fit": fit_charts,
    "end_to_end": end_to_end_charts,
    "peers": peers_charts,
    "cards": cards_charts,
    "largest_rtx2070": foretold_charts,
    "published": published_charts,
    "ladder": ladder_charts,
}
"""Functions that make the charts of a part, by the part's name."""
