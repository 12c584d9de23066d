"""Two blocks of each kind of today's full-size transformers, and an autoencoder, run here: peaks planned, measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sd_lowvram.checkpoints.architectures import architecture, empty_model
from sd_lowvram.checkpoints.unfilled import Unfilled
from sd_lowvram.memory import measured_peak
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.planning.stage_costs import StageCosts
from sd_lowvram.planning.stages import Shape
from sd_lowvram.session import anatomy_of, attached
from sd_lowvram.settings import Settings
from sd_lowvram.units import GIB, MIB
from sd_lowvram.weights import weight_bytes

from .tables import Sheet, filled

_BLOCKS = 2
_COUNTS = {
    "FluxTransformer2DModel": ("num_layers", "num_single_layers"),
    "Flux2Transformer2DModel": ("num_layers", "num_single_layers"),
    "SD3Transformer2DModel": ("num_layers",),
    "ZImageTransformer2DModel": ("n_layers", "n_refiner_layers"),
    "ChromaTransformer2DModel": ("num_layers", "num_single_layers"),
    "QwenImageTransformer2DModel": ("num_layers",),
}
"""Numbers of blocks in a transformer's configuration."""
MODELS = ("flux1-dev", "klein-4b", "klein-9b", "sd3.5-large", "z-image", "chroma1", "qwen-image")
_WAYS = {
    "streamed": Settings(offload="layer"),
    "resident": Settings(),
    "plain": Settings(vae_tiles="off"),
    "exact": Settings(vae_tiles="exact"),
}
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_RUNS = (("bfloat16", "streamed"), ("bfloat16", "resident"), ("float32", "resident"))
_WIDE = ("flux1-dev", "sd3.5-large")
"""Run in float32, too: the others are as wide, or take twice the memory."""


def run(
    models: Sequence[str] = MODELS, side: int = 256, decoded: Sequence[int] = (512,), *, out: Path | None
) -> dict[str, Any]:
    """Run the transformers and Qwen-Image's autoencoder on the CPU; writes ``out`` and JSON, row by row, and goes on
    with what lacks.

    Args:
        side: of the pictures of the transformers.
        decoded: sides of those of the autoencoder.
    """
    runs = [(model, *one) for model in models for one in _RUNS if one[0] == "bfloat16" or model in _WIDE]
    names = "model", "dtype", "way"
    cases = [{"part": "transformer", "side": side, **dict(zip(names, one, strict=True))} for one in runs]
    vae = {"model": "qwen-image", "part": "vae", "dtype": "float32"}
    cases += [{**vae, "side": one, "way": way} for one in decoded for way in ("exact", "plain")]
    return filled({"blocks": _BLOCKS}, cases, _measured, SHEET.lines, out, "runs")


def _measured(model: str, part: str, side: int, dtype: str, way: str) -> dict[str, Any]:
    anatomy, settings = _anatomy(model, part, dtype), _WAYS[way]
    costs = StageCosts(anatomy, Shape(side, side), False, torch.device("cpu"))
    stage = next(one for one in costs.stages if one.component == part)
    planned = costs(stage, settings)
    given = tree_map(_drawn, stage.inputs())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each has buffers of its own
    start = time.process_time()
    with torch.inference_mode(), attached(anatomy.components[part], settings, device="cpu"):
        measured = measured_peak(functools.partial(stage.run, *given))
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    return {
        "weights_bytes": weight_bytes(anatomy.components[part]),
        "planned_bytes": planned.allocated_peak_bytes,
        "measured_bytes": measured,
        "seconds": seconds,
    }


@functools.lru_cache(1)
def _anatomy(model: str, part: str, dtype: str) -> Anatomy:
    config = architecture(model)
    if part == "transformer":
        config[part] |= dict.fromkeys(_COUNTS[config[part]["_class_name"]], _BLOCKS)
    with Unfilled():  # not on the meta device, as some keep tables that are no buffers
        made = empty_model(config[part])
    return anatomy_of(_filled(nn.Module.to(made, _TYPES[dtype]).eval().requires_grad_(False)))


def _filled(module: nn.Module) -> nn.Module:
    """Fill a module with a million repeated numbers; drawing billions would take longer than the run."""
    noise = (torch.rand(MIB, generator=torch.Generator().manual_seed(0)) - 0.5) / 20
    for tensor in (*module.parameters(), *module.buffers()):
        for piece in tensor.view(-1).split(MIB):
            piece.copy_(noise[: len(piece)])
    return module


def _drawn(leaf: Any) -> Any:
    return torch.randn_like(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


SHEET = Sheet(
    title="Full-size blocks of today's models, run here",
    note=(
        "{blocks} blocks of each kind, in the real widths, and an autoencoder whole, one frame: a step, or a decode, "
        "on a CPU, random weights. *Planned*: most bytes of what the run makes, as a plan counts it for a CPU; "
        "*measured*: of the CPU's allocator. Weights are not in it; copies of the layer that is streamed are. SD3.5's "
        "attention hands on a part of a map, in rows of a batch: there a CPU's product in bf16 copies the weight for "
        "each row, which is not foretold, and torch adds the bias in place, for which a plan counts another map."
    ),
    columns=(
        ("model", "`{model}`"),
        ("part", "{part}"),
        ("side", "{side}"),
        ("weights", lambda row: f"{row['weights_bytes'] / GIB:.2f} GiB"),
        ("run", "{dtype}, {way}"),
        ("planned MiB", lambda row: f"{row['planned_bytes'] / MIB:.1f}"),
        ("measured MiB", lambda row: f"{row['measured_bytes'] / MIB:.1f}"),
        ("measured over planned", lambda row: f"{row['measured_bytes'] / row['planned_bytes']:.4f}"),
        ("seconds of a processor", lambda row: f"{row['seconds']:.0f}"),
    ),
    of=5,
)

lines = SHEET.lines
