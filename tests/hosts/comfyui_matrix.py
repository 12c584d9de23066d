"""Every kind of checkpoint, storage and stock node, each side of ours, in a ComfyUI process: a JSON line for each.

COMFYUI_PYTHON tests/hosts/comfyui_matrix.py COMFYUI_DIR [kind ...]
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import comfyui_inside as inside
import torch

ON = {
    "attention": "sliced",
    "attention_mib": 1,
    "residual_strips": 3,
    "feed_forward_chunks": 2,
    "transformer_chunks": 2,
    "park_skips": "on",
    "guidance_in_turn": "on",
}


def main(host: str, *kinds: str) -> None:
    inside.enter(Path(host))
    nodes = inside.our_nodes()
    for kind in kinds or inside.KINDS:
        for storage in inside.STORAGE:
            _storage(nodes, kind, storage)


def _storage(nodes: dict[str, Any], kind: str, storage: str) -> None:
    model = inside.model(kind, storage)
    for stock in (None, *inside.STOCK):
        plain = _attempt(lambda stock=stock: inside.sample(inside.patched(model, stock)))
        for knobs in ({}, ON):
            for side in ("before", "after") if stock else ("alone",):
                ours = _attempt(lambda k=knobs, s=side, stock=stock: inside.sample(_both(nodes, model, stock, s, k)))
                case = {"kind": kind, "storage": storage, "stock": stock, "ours": side, "on": bool(knobs)}
                print(json.dumps(case | _compared(plain, ours)), flush=True)


def _both(nodes: dict[str, Any], model: Any, stock: str | None, side: str, knobs: dict[str, Any]) -> Any:
    """``model`` through the stock node, with ours before or after it."""
    if side == "before":
        return inside.patched(inside.ours(nodes, model, **knobs)[0], stock)
    return inside.ours(nodes, inside.patched(model, stock), **knobs)[0]


def _attempt(work: Any) -> Any:
    try:
        return work()
    except Exception as error:
        return error


def _compared(plain: Any, ours: Any) -> dict[str, Any]:
    if isinstance(plain, Exception):
        return {"stock_error": f"{type(plain).__name__}: {plain}"}
    if isinstance(ours, Exception):
        where = traceback.format_exception(ours)[-4:]
        return {"error": f"{type(ours).__name__}: {ours}", "where": "".join(where)}
    plain, ours = plain.double(), ours.double()
    return {"relative": float((plain - ours).norm() / plain.norm()), "finite": bool(torch.isfinite(ours).all())}


if __name__ == "__main__":
    main(*sys.argv[1:])
