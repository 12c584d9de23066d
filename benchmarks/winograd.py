"""``winograd``: what Winograd's convolutions save, how far they are off, and how fast they are here.

The times are those of a plain PyTorch implementation beside torch's own convolution, in pairs within one process, at
the shapes of the strips in which Stable Diffusion's decoder makes a 512x512 picture, and of maps in its UNet, whose
layers the ``winograd`` knob leaves alone; kernels are transformed at each call as the knob does. And those of that
decoder whole, with the knob and without.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sd_lowvram import progress
from sd_lowvram.devices.pairs import figures, in_turn
from sd_lowvram.files.tables import table
from sd_lowvram.kernels.winograd import SIDES, convolve, gain, transformed
from sd_lowvram.settings import Settings

from .tables import pair_cells, trusted, written

PUBLISHED = {2: (2.25, 4.00, 1.77), 4: (4.00, 2.25, 4.00), 6: (5.06, 1.80, 7.12), 8: (5.76, 1.56, 11.1)}
"""Operations saved, intermediates and weights in times the plain ones, as Chen et al. 2023 print them by tile."""

_DECODER = ((512, 64, 64), (512, 64, 128), (512, 32, 256), (256, 32, 512), (128, 64, 512))
_UNET = ((320, 64, 64), (640, 32, 32), (1280, 16, 16))
SHAPES = (*_DECODER, *_UNET)
"""Channels, rows and columns of the decoder's strips, and of maps in the UNet at 512x512."""

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ON_CPU = torch.device("cpu")


def full_size_decoder() -> Any:
    """SD1.5's autoencoder in float32 with random weights."""
    from sd_lowvram.checkpoints.architectures import architecture, build_components

    return build_components(architecture("sd15"), torch.float32, "cpu", only=("vae",))["vae"]


def run(
    out: Path | None = None,
    pairs: int = 5,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    decoder: Callable[[], Any] = full_size_decoder,
) -> dict[str, Any]:
    """Measure on the CPU; with ``out`` written as Markdown, and as JSON beside it.

    Args:
        decoder: makes an autoencoder, of which a decode of 64x64 latents is measured.
    """
    with torch.inference_mode():
        report = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "tiles": [_tile(side) for side in SIDES],
            "errors": _errors(),
            "times": list(_times(shapes, pairs)),
            "decode": _decode(decoder(), pairs),
        }
    return written(report, lines, out)


def _tile(side: int) -> dict[str, Any]:
    ours = {name: float(value) for name, value in asdict(gain(side)).items()}
    return {"tile": side, **ours, "published": dict(zip(ours, PUBLISHED[side], strict=True))}


def _layer(channels: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A map (1, C, rows, columns) and kernels (C, C, 3, 3) that keep its spread."""
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(channels, channels, 3, 3, generator=noise) / (3 * channels**0.5)
    return torch.randn(1, channels, rows, columns, generator=noise), weight


def _errors(channels: int = 128, side: int = 48) -> list[dict[str, Any]]:
    """Relative errors against float64, torch's own convolution first; in every type its rounded map and kernels are
    what the exact result is of."""
    x, weight = _layer(channels, side, side)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": functools.partial(functional.conv2d, padding=1)}
    ways |= {f"F({tile}, 3)": functools.partial(_by_tiles, tile) for tile in SIDES}
    rows = []
    for way, make in ways.items():
        row: dict[str, Any] = {"way": way}
        for name, dtype in _TYPES.items():
            narrow = x.to(dtype), weight.to(dtype)
            exact = functional.conv2d(narrow[0].double(), narrow[1].double(), padding=1)
            row[name] = float((make(*narrow).double() - exact).norm() / exact.norm())
        rows.append(row)
    return rows


def _by_tiles(tile: int, x: Tensor, weight: Tensor) -> Tensor:
    return convolve(x, transformed(weight, tile), None, tile)


def _times(shapes: Sequence[tuple[int, int, int]], pairs: int) -> Iterator[dict[str, Any]]:
    for number, (shape, tile) in enumerate(itertools.product(shapes, SIDES)):
        x, weight = _layer(*shape)
        kernels = transformed(weight, tile)
        ours = functools.partial(_by_tiles, tile, x, weight)
        plain = functools.partial(functional.conv2d, x, weight, padding=1)
        (theirs, seconds), own = in_turn((plain, ours), pairs, _ON_CPU)
        yield {
            **dict(zip(("channels", "rows", "columns"), shape, strict=True)),
            "tile": tile,
            **figures(theirs, seconds, own),
            "weight_bytes": kernels.nbytes,
        }
        progress.report("shapes and tiles", number + 1, len(shapes) * len(SIDES))


def _decode(vae: Any, pairs: int) -> dict[str, Any]:
    """Seconds of a decode of 64x64 latents with the knob and without, in turn, and their relative difference."""
    from sd_lowvram.session import attached

    noise = torch.Generator().manual_seed(0)
    latents = torch.randn(1, vae.config.latent_channels, 64, 64, generator=noise)
    pictures: dict[str, Tensor] = {}

    def plain() -> Tensor:
        return pictures.setdefault("plain", vae.decode(latents).sample)

    def ours() -> Tensor:
        with attached(vae, Settings(winograd=True), device="cpu"):
            return pictures.setdefault("ours", vae.decode(latents).sample)

    (theirs, seconds), own = in_turn((plain, ours), pairs, _ON_CPU)
    error = float((pictures["ours"] - pictures["plain"]).norm() / pictures["plain"].norm())
    return {**figures(theirs, seconds, own), "error": error, "pairs": pairs}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Result of :func:`run` as Markdown."""
    yield "# Winograd's 3x3 convolutions"
    yield ""
    yield (
        "What a tile changes, counted from its exact transforms / as Chen et al. 2023 print it: operations saved, and "
        "the room of transformed maps and kernels, each times the plain one's."
    )
    yield ""
    names = ("operations", "intermediates", "weights")
    cells = ([f"{row[name]:.2f} / {row['published'][name]:.3g}" for name in names] for row in report["tiles"])
    sides = [f"{row['tile']}x{row['tile']}" for row in report["tiles"]]
    yield from table(("tile", *names), ([side, *row] for side, row in zip(sides, cells, strict=True)))
    yield ""
    yield "Relative error against float64, of 128 channels:"
    yield ""
    errors = ([row["way"], *(f"{row[name]:.1e}" for name in _TYPES)] for row in report["errors"])
    yield from table(("", *_TYPES), errors)
    yield ""
    yield (
        f"Seconds in float32 on this CPU, {report['threads']} threads, torch {report['torch']}: torch's own "
        "convolution, ours in plain PyTorch, and the ratio of their medians, which is above 1 where ours is faster. "
        f"{_verdict(report['times'])}"
    )
    yield ""
    heads = ("channels", "strip", "tile", "torch, s", "Winograd, s", "times as fast", "its kernels")
    yield from table(heads, map(_row, report["times"]))
    yield ""
    decode = report["decode"]
    theirs, seconds, ratio = pair_cells(decode, "{:.1f}")
    yield (
        f"SD1.5's decoder whole, 512x512 in float32, without `winograd` and with it, medians of {decode['pairs']} "
        f"pairs: {theirs} and {seconds} s, times as fast: {ratio}; relative difference {decode['error']:.1e}."
    )


def _row(row: dict[str, Any]) -> list[str]:
    strip = f"{row['rows']}x{row['columns']}"
    room = f"{row['weight_bytes'] / 2**20:.1f} MiB"
    return [str(row["channels"]), strip, f"{row['tile']}", *pair_cells(row, "{:.4f}"), room]


def _verdict(times: Sequence[dict[str, Any]]) -> str:
    """Sentence on the number of shapes for which each tile is faster."""
    if not all(map(trusted, times)):
        return "The machine was busy: where it is faster is not told."
    won = {tile: sum(row["ratio"] > 1 for row in times if row["tile"] == tile) for tile in SIDES}
    shapes = len(times) // len(SIDES)
    if not any(won.values()):
        return "It is faster nowhere."
    told = ", ".join(f"F({tile}, 3) at {number}" for tile, number in won.items())
    return f"Of {shapes} shapes it is faster with {told}."
