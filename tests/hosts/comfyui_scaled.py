"""Linear layers in 8 bits as ComfyUI loads them, next to our widening of the same weights: JSON, a line for each.

COMFYUI_PYTHON tests/hosts/comfyui_scaled.py COMFYUI_DIR
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import comfyui_inside as inside
import torch
from torch import Tensor

KINDS = ("scaled_fp8", "float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8_tensorwise by rows")
TYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = 64, 96


def stored(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits and its scale, by tensor or by row."""
    if kind.startswith("int8"):
        scale = (weight.abs().amax(1, keepdim=True) if "rows" in kind else weight.abs().max()) / 127
        return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale
    narrow = torch.float8_e5m2 if "e5m2" in kind else torch.float8_e4m3fn
    scale = weight.abs().max() / torch.finfo(narrow).max
    return (weight / scale).to(narrow), scale


def state_of(weight: Tensor, scale: Tensor, bias: Tensor, kind: str) -> dict[str, Any]:
    """As a file of that kind has them, in the newer layout."""
    import comfy.utils

    if kind == "scaled_fp8":
        marker = torch.zeros(2, dtype=weight.dtype)
        old = {"l.weight": weight, "l.scale_weight": scale, "l.bias": bias, "scaled_fp8": marker}
        made: dict[str, Any] = comfy.utils.convert_old_quants(old, "", {})[0]
        return made
    told = json.dumps({"format": kind.split(maxsplit=1)[0]}).encode()
    quant = torch.tensor(list(told), dtype=torch.uint8)
    return {"l.weight": weight, "l.weight_scale": scale, "l.bias": bias, "l.comfy_quant": quant}


def main() -> None:
    inside.enter(Path(sys.argv[1]))
    import comfy.ops

    if not hasattr(comfy.ops, "mixed_precision_ops"):
        return
    inside.our_nodes()
    widen = importlib.import_module(f"{inside.pack_name()}.sd_lowvram.kernels.scaled").widen_scaled
    drawn = torch.Generator().manual_seed(0)
    for kind, dtype in itertools.product(KINDS, TYPES):
        weight, scale = stored(torch.randn(*reversed(WIDTHS), generator=drawn), kind)
        model = torch.nn.Module()
        model.l = comfy.ops.mixed_precision_ops({}, dtype).Linear(*WIDTHS, bias=True, device="cpu", dtype=dtype)
        model.load_state_dict(state_of(weight, scale, torch.zeros(WIDTHS[1], dtype=dtype), kind), strict=False)
        theirs = model.l.weight
        kept = hasattr(theirs, "dequantize") and type(theirs.data) is not Tensor
        same = torch.equal((theirs.dequantize() if kept else theirs).to(dtype), widen(weight, scale, dtype))
        print(json.dumps({"kind": kind, "dtype": str(dtype), "kept": kept, "same": same}))


if __name__ == "__main__":
    main()
