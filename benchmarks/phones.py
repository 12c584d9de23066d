"""``phones``: two figures of a published run on a phone's GPU beside ours, and what GELU reads and writes, counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sd_lowvram.checkpoints.meta_model import meta_anatomy
from sd_lowvram.planning.as_others import request_by
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.search import make_plan
from sd_lowvram.settings import Settings
from sd_lowvram.tracing import trace
from sd_lowvram.units import GIB, parse_size

from .tables import Columns, rows_table, written

PUBLISHED = {"weights": 2093, "step": 84}
"""MB of 10^6 bytes that Chen et al. 2023 tell for SD1.5 at 512x512; not said: whether the decode has its part in it."""
PUBLISHED_GELU = (8, 10)
"""Maps that GELU by tanh writes and reads where each operation is a shader, by the same."""

_CARD, _SIDE, _MB = "rtx3060", 512, 10**6
_BUDGETS = ("8GB", "580MB")
_MAP = (2, 64, 256)


def run(*, out: Path | None) -> dict[str, Any]:
    """Plan and count; nothing is computed. With ``out`` written as Markdown, and as JSON beside it."""
    anatomy = meta_anatomy("sd15", torch.float16)

    def planned(vram: int) -> Plan:
        request = request_by("ours", anatomy, gpu=_CARD, vram=vram, ram=32 * GIB, width=_SIDE, height=_SIDE, passes=1)
        return make_plan(anatomy, request, Settings())

    plans = [{"vram": vram, **_figures(planned(parse_size(vram)))} for vram in _BUDGETS]
    return written({"plans": plans, "gelu": gelu_maps()}, lines, out)


def _figures(plan: Plan) -> dict[str, Any]:
    """Bytes on the device: weights at most in any stage, and intermediates by stage."""
    stages = {stage.name: stage for stage in plan.stages}
    return {
        "weights_bytes": max(stage.weights_bytes for stage in stages.values()),
        **{f"{name}_bytes": stages[name].activation_bytes for name in ("denoise", "decode")},
    }


def written_out(x: Tensor) -> Tensor:
    """GELU by tanh, an operator for each operation."""
    inner = 0.7978845608 * (x + 0.044715 * x.pow(3))
    return (0.5 * x) * (1 + inner.tanh())


def gelu_maps() -> dict[str, list[int]]:
    """Maps written and read, counted by a trace, by way: each operator writes one."""
    ways: dict[str, Callable[..., Tensor]] = {
        "written out": written_out,
        "torch's operator": functools.partial(functional.gelu, approximate="tanh"),
    }
    given = torch.empty(_MAP, device="meta")
    traced = {name: trace(way, given) for name, way in ways.items()}
    maps = {name: one.moved_bytes // (given.numel() * given.element_size()) for name, one in traced.items()}
    return {name: [one.operators, maps[name] - one.operators] for name, one in traced.items()}


_COLUMNS: Columns = (
    ("", "{name}"),
    ("weights, MB", "{weights:.0f}"),
    ("intermediates of a step, MB", "{step:.0f}"),
    ("of the decode, MB", "{decode}"),
    ("command", "{command}"),
)


def _rows(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"name": "published, on a phone", **PUBLISHED, "decode": "not told apart", "command": ""}
    for plan in report["plans"]:
        yield {
            "name": f"foretold, {plan['vram']}",
            "weights": plan["weights_bytes"] / _MB,
            "step": plan["denoise_bytes"] / _MB,
            "decode": f"{plan['decode_bytes'] / _MB:.0f}",
            "command": f"`sd-lowvram plan --model sd15 --no-guidance --gpu {_CARD} --vram {plan['vram']} --json`",
        }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Result of :func:`run` as Markdown."""
    yield "# SD1.5 at 512x512 as on a phone"
    yield ""
    yield (
        "fp16, one pass a step (no guidance), MB of 10^6 bytes on the device at a time. Published: Chen et al. 2023, "
        "on phones' GPUs. Ours: foretold by a trace of the model's own modules; weights of text encoder, "
        "UNet and autoencoder together where the budget holds them, streamed where it does not. A budget holds the 472 "
        "MB of CUDA's own too."
    )
    yield ""
    yield from rows_table(_COLUMNS, _rows(report))
    yield ""
    yield "GELU by tanh, maps in device memory, counted by a trace of each way:"
    yield ""
    ways = [
        {"way": "published: a shader for each operation", "maps": PUBLISHED_GELU},
        {"way": "published: one shader", "maps": (1, 1)},
        *({"way": f"counted: {name}", "maps": maps} for name, maps in report["gelu"].items()),
    ]
    columns: Columns = (
        ("way", "{way}"),
        ("written", lambda row: str(row["maps"][0])),
        ("read", lambda row: str(row["maps"][1])),
    )
    yield from rows_table(columns, ways)
