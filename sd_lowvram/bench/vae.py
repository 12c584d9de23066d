"""Exact tiles beside the plain decode: time in pairs, and how far every way of decoding is from the plain one."""

from __future__ import annotations

import json as json_
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import progress
from ..checkpoints.architectures import build_components
from ..demo import MODEL_PATH
from ..session import attached
from ..settings import Settings

MAPS = ("held", "parked", "recomputed")
_DEAR = "recomputed"


def run(json: bool = False, sizes: Sequence[int] = (256, 384), repeats: int = 2, side: int = 1024) -> dict[str, Any]:
    """Measure and print, as tables or as one JSON object; returns what was measured.

    Args:
        sizes: sides in pixels of the square pictures that a full-size decoder with random weights decodes in float32.
        repeats: rounds; in each one every way of decoding runs once, in turn. The map that is recomputed, which takes
            several times as long, has a part in the last one only, between two plain decodes.
        side: of the square picture that the demo autoencoder decodes for the differences.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {
        "device": device,
        "threads": torch.get_num_threads(),
        "times": list(_times(sizes, repeats, device)),
        "differences": _differences(side),
    }
    print(json_.dumps(report) if json else "\n".join(_lines(report)))
    return report


def _times(sizes: Sequence[int], repeats: int, device: str) -> Iterator[dict[str, Any]]:
    if sizes:
        vae: Any = build_components("sd15", device=device, only=("vae",))["vae"]
        yield from (_timed(vae, size, repeats) for size in sizes)


def _timed(vae: Any, size: int, repeats: int) -> dict[str, Any]:
    """Seconds of the plain decode, and the others' time over it: ratios of medians."""
    latents = torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(0)).to(vae.device)
    ways: dict[str, Settings] = {"plain": Settings()}
    ways |= {kind: Settings(vae_tiles="exact", vae_map=kind) for kind in MAPS}
    rounds = [[way for way in ways if way != _DEAR] for _ in range(repeats)]
    rounds[-1] += [_DEAR, "plain"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with attached(vae, Settings(vae_tiles="exact")):
        _seconds(vae, latents[..., :8, :8])  # libraries make themselves ready
    total, done = sum(map(len, rounds)), 0
    for turn in rounds:
        for way in turn:
            with attached(vae, ways[way]):
                seconds[way].append(_seconds(vae, latents))
            done += 1
            progress.report(f"{size}x{size}", done, total)
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    return {"size": size, "plain_seconds": medians["plain"]} | {kind: medians[kind] / medians["plain"] for kind in MAPS}


def _seconds(vae: Any, latents: Tensor) -> float:
    wait: Callable[[], Any] = torch.cuda.synchronize if latents.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    with torch.no_grad():
        vae.decode(latents)
    wait()
    return time.perf_counter() - start


def _differences(side: int) -> list[dict[str, Any]]:
    """Of the demo autoencoder's 8-bit pictures from those of its plain decode."""
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(MODEL_PATH / "vae", torch_dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        latents = vae.encode(_discs(side)).latent_dist.mode()
        plain = _eight_bits(vae.decode(latents).sample)
        for way, decoded in _decoded(vae, latents):
            rows.append(_difference(way, decoded, plain))
            progress.report("differences", len(rows), len(MAPS) + 2)
    return rows


def _decoded(vae: Any, latents: Tensor) -> Iterator[tuple[str, Tensor]]:
    for kind in MAPS:
        with attached(vae, Settings(vae_tiles="exact", vae_map=kind)):
            yield f"exact tiles, {kind}", vae.decode(latents).sample
    with attached(vae, Settings(vae_tiles="fast")):
        yield "fast tiles", vae.decode(latents).sample
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 512, 64  # what it takes for Stable Diffusion's own autoencoder
    yield "diffusers tiling", vae.decode(latents).sample
    vae.disable_tiling()


def _discs(side: int) -> Tensor:
    """A picture (1, 3, side, side) in [-1, 1]: forty coloured discs on a gradient, equal on every machine."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(*[torch.linspace(0, 1, side)] * 2, indexing="ij")
    picture = torch.stack([rows, columns, 1 - rows])
    for _ in range(40):
        top, left, radius, *colour = torch.rand(6, generator=draw).tolist()
        inside = (rows - top).square() + (columns - left).square() < (0.02 + radius / 8) ** 2
        picture[:, inside] = torch.tensor(colour)[:, None]
    return picture[None] * 2 - 1


def _eight_bits(pixels: Tensor) -> Tensor:
    return (pixels / 2 + 0.5).clamp(0, 1).mul(255).round()


def _difference(way: str, pixels: Tensor, plain: Tensor) -> dict[str, Any]:
    apart = (_eight_bits(pixels) - plain).abs()
    return {
        "way": way,
        "mean": float(apart.mean()),
        "most": int(apart.max()),
        "differing_percent": float((apart.amax(1) > 0).double().mean() * 100),
        "over_one_percent": float((apart.amax(1) > 1).double().mean() * 100),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"Time of a full-size float32 decode on {report['device']}, {report['threads']} threads; plain = 1"
    yield f"{'size':>10} {'plain':>10}" + "".join(f"{kind:>12}" for kind in MAPS)
    for row in report["times"]:
        ratios = "".join(f"{row[kind]:12.2f}" for kind in MAPS)
        yield f"{row['size']:>10} {row['plain_seconds']:8.2f} s{ratios}"
    yield ""
    yield "Difference from the plain decode, of 255, demo autoencoder"
    yield f"{'':24} {'mean':>8} {'most':>6} {'pixels off':>12} {'by more than 1':>16}"
    for row in report["differences"]:
        percents = f"{row['differing_percent']:10.2f} % {row['over_one_percent']:14.2f} %"
        yield f"{row['way']:24} {row['mean']:8.4f} {row['most']:6} {percents}"
