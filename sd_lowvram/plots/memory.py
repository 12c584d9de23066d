"""Charts of memory: the plan of each stage, the measured run, and the budget.

Duck-typed on plans and measurements. Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..units import GIB, MIB, format_size
from .style import ACTIVATIONS, BUDGET, HOST, MEASURED, TEXT, WEIGHTS, as_png, check_plots, new_figure

_NARROWEST = 0.16
"""Share of the width that the shortest stage keeps, so that its name can be read."""


@dataclass(frozen=True)
class _Piece:
    """A run of a stage: the planned peak, the traced timeline and the measurement, if there are any."""

    plan: Any
    timeline: Any
    measured: Any

    @property
    def seconds(self) -> float:
        seconds: float = self.measured.seconds if self.measured else self.plan.seconds
        return seconds


def memory_figure(plan: Any, measured: Any = None, timelines: Sequence[Any] = ()) -> Any:
    """A matplotlib Figure of the memory that each stage takes: weights, activations, and what waits in host memory.

    Stages lie side by side, as wide as they are long (the shortest are widened). On a CPU host memory is drawn on top,
    as its allocator counts both; on a GPU it is only named.

    Args:
        plan: a Plan.
        measured: a Run (``sd_lowvram.measured``), drawn as a line over the prediction.
        timelines: those of :func:`sd_lowvram.planning.timeline.timelines_of`; a stage without one shows its peak.

    Raises:
        BadInputError: matplotlib is not installed.
    """
    check_plots()
    both = plan.request.device.type == "cpu"
    figure = new_figure(10, 5.4, _layout())
    axes = figure.add_subplot()
    bands = _bands(plan, measured, timelines)
    left, top = 0.0, 0
    for band, width in zip(bands, _widths(bands), strict=True):
        highest = _draw_band(axes, band, left, width, both)
        _name_band(axes, band, left, width, highest, plan.request.steps)
        top = max(top, highest)
        left += width
    _decorate(axes, plan, measured, top)
    return figure


def memory_png(plan: Any, measured: Any = None, timelines: Sequence[Any] = ()) -> bytes:
    """:func:`memory_figure` as the bytes of a PNG file."""
    return as_png(memory_figure(plan, measured, timelines))


def _bands(plan: Any, measured: Any, timelines: Sequence[Any]) -> list[list[_Piece]]:
    """Runs of stages in their order, neighbours of one name together."""
    by_stage = {(timeline.name, timeline.component): timeline for timeline in timelines}
    planned = {(stage.name, stage.component): stage for stage in plan.stages}
    if measured is None:
        pieces = [_Piece(stage, by_stage.get(key), None) for key, stage in planned.items()]
    else:
        seen = [((stage.name, stage.component), stage) for stage in measured.stages]
        pieces = [_Piece(planned[key], by_stage.get(key), stage) for key, stage in seen if key in planned]
    return [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: piece.plan.name)]


def _widths(bands: list[list[_Piece]]) -> list[float]:
    seconds = [sum(piece.seconds for piece in band) for band in bands]
    shares = [max(_NARROWEST, share / (sum(seconds) or 1.0)) for share in seconds]
    return [share / sum(shares) for share in shares]


def _draw_band(axes: Any, band: list[_Piece], left: float, width: float, both: bool) -> int:
    """Draw the pieces of a band; returns the most bytes that were drawn."""
    total, top = sum(piece.seconds for piece in band) or 1.0, 0
    for piece in band:
        share = width * piece.seconds / total
        device, host = _timeline(piece)
        xs = [left + share * place / len(device) for place in range(len(device) + 1)]
        weights = min(piece.plan.weights_bytes, piece.plan.peak_bytes)
        resident = [min(weights, value) for value in device]
        held = [level + other for level, other in zip(device, host, strict=True)] if both else device
        ground = [0] * len(device)
        for low, high, colour in (
            (ground, resident, WEIGHTS),
            (resident, device, ACTIVATIONS),
            (device, held, HOST),
        ):
            lower, upper = [*low, low[-1]], [*high, high[-1]]
            axes.fill_between(xs, lower, upper, step="post", color=colour, linewidth=0, zorder=1)
        top = max(top, *held, _draw_measured(axes, piece.measured, left, share))
        left += share
    return top


def _timeline(piece: _Piece) -> tuple[list[int], list[int]]:
    if piece.timeline is not None:
        return list(piece.timeline.device_bytes), list(piece.timeline.host_bytes)
    return [piece.plan.peak_bytes], [piece.plan.host_bytes]


def _draw_measured(axes: Any, stage: Any, left: float, width: float) -> int:
    if stage is None:
        return 0
    line = {"color": MEASURED, "linewidth": 1.3, "zorder": 3, "solid_joinstyle": "round"}
    if stage.curve:
        seconds, heights = zip(*stage.curve, strict=True)
        xs = [left, *(left + width * second / max(stage.seconds, 1e-9) for second in seconds[1:]), left + width]
        axes.plot(xs, [*heights, heights[-1]], drawstyle="steps-post", **line)
    else:
        axes.plot([left, left + width], [stage.peak_bytes] * 2, **line)
    return int(stage.peak_bytes)


def _name_band(axes: Any, band: list[_Piece], left: float, width: float, highest: int, steps: int) -> None:
    first = band[0]
    measured = [piece.measured for piece in band if piece.measured]
    planned = sum(plan.seconds for plan in {id(piece.plan): piece.plan for piece in band}.values())
    name = first.plan.name
    if name == "denoise" and measured:
        name, planned = f"denoise ({len(band)} step{'s' * (len(band) > 1)})", planned * len(band) / steps
    lines = [name, f"planned {_time(planned)}"]
    if measured:
        lines.append(f"measured {_time(sum(stage.seconds for stage in measured))}")
    middle, top = left + width / 2, axes.get_xaxis_transform()
    axes.text(middle, 1.03, lines[0], transform=top, ha="center", va="bottom", color=TEXT, fontweight="bold")
    axes.text(middle, -0.02, "\n".join(lines[1:]), transform=top, ha="center", va="top", color=TEXT, fontsize=9)
    axes.annotate(
        format_size(highest), (middle, highest), xytext=(0, 3), textcoords="offset points", ha="center", color=TEXT,
        fontsize=9, zorder=5,
    )  # fmt: skip
    if left:
        axes.axvline(left, color="white", linewidth=2.5, zorder=2)


def _decorate(axes: Any, plan: Any, measured: Any, top: int) -> None:
    """Title, budget, axis and legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    request, predicted = plan.request, plan.predicted
    budget = request.vram - predicted.overhead_bytes
    both = request.device.type == "cpu" and predicted.host_bytes > 0
    handles: list[Any] = [Patch(color=WEIGHTS, label="weights"), Patch(color=ACTIVATIONS, label="activations")]
    if predicted.host_bytes:
        colour = {"color": HOST} if request.device.type == "cpu" else {"alpha": 0}  # a GPU's is not drawn
        handles.append(Patch(**colour, label=f"host memory, up to {format_size(predicted.host_bytes)}"))
    if measured is not None:
        peak = format_size(measured.peak_bytes)
        handles.append(Line2D([], [], color=MEASURED, label=f"measured{', all' if both else ''}: at most {peak}"))
    label = f"budget {format_size(request.vram)}{' without host memory' if both else ''}"
    if predicted.overhead_bytes:
        label += f" less {format_size(predicted.overhead_bytes)} overhead"
    if budget <= 1.6 * top:
        axes.axhline(budget, color=BUDGET, linewidth=1.4, linestyle=(0, (5, 3)), zorder=4)
        handles.append(Line2D([], [], color=BUDGET, linestyle="--", label=label))
        top = max(top, budget)
    else:
        handles.append(Patch(alpha=0, label=f"{label}, far above"))
    unit, name = (GIB, "GiB") if top >= 2 * GIB else (MIB, "MiB")
    axes.set(xlim=(0, 1), ylim=(0, 1.08 * top), xticks=[])
    axes.yaxis.set_major_locator(_ticks(unit))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / unit:g}")
    axes.set_ylabel(name, color=TEXT)
    axes.grid(axis="y", color="white", linewidth=0.8, alpha=0.55, zorder=2.5)
    axes.tick_params(colors=TEXT, length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#b9bec6")
    title = f"{request.width}x{request.height}, batch {request.batch}: {format_size(predicted.peak_bytes)} planned"
    axes.figure.suptitle(title, color=TEXT, fontsize=13, x=0.02, ha="left")
    axes.figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if len(handles) < 5 else 3,
        frameon=False,
        labelcolor=TEXT,
        fontsize=9,
        columnspacing=1.3,
        handlelength=1.5,
    )


def _layout() -> Any:
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)


def _ticks(unit: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    class InUnits(MaxNLocator):
        """Round numbers of the unit, not of bytes."""

        def tick_values(self, low: float, high: float) -> Any:
            return [unit * value for value in super().tick_values(low / unit, high / unit)]

    return InUnits(nbins=7, steps=[1, 2, 2.5, 5, 10])


def _time(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
