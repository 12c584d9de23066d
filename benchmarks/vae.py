"""Exact tiles compared with the plain decode: time in pairs, peaks, and how far every way of decoding is from plain."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lowvram import progress
from sd_lowvram.checkpoints.architectures import autoencoder, build_components
from sd_lowvram.demo import MODEL_PATH
from sd_lowvram.devices.pairs import CallTime, spread, time_call
from sd_lowvram.files import table
from sd_lowvram.session import attached
from sd_lowvram.settings import Settings
from sd_lowvram.tracing import trace
from sd_lowvram.units import MIB

from .tables import BUSY, eight_bits, figure, trusted, written

MAPS = ("held", "parked", "recomputed")
_EXACT = ("exact",)
"""Ways for autoencoders of frames, which store no maps."""
_DEAR = "recomputed"
_THEIRS = "diffusers tiling"
_WITH_DEMO = ("sd15", "sdxl")
"""Models whose latents are of the demo autoencoder's kind; those of other models are compared with random weights."""


def run(
    sizes: Sequence[int] = (256, 384),
    repeats: int = 2,
    side: int | None = None,
    model: str = "sd15",
    traced: Sequence[int] = (1024, 2048, 4096),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, also into ``out`` as Markdown, and JSON next to it.

    Args:
        model: whose autoencoder: a name of :data:`checkpoints.architectures.AUTOENCODERS`.
        traced: sides in pixels of the pictures whose peaks are traced.
        sizes: sides in pixels of the square pictures that a full-size decoder with random weights decodes in float32.
        repeats: rounds; in each one every way of decoding runs once, in turn. The map that is recomputed, which takes
            several times as long, has a part in the last one only, between two plain decodes.
        side: of the square picture that is decoded for the differences: 1024 pixels by the demo autoencoder, where
            ``model`` is one of Stable Diffusion's, and 256 by a full-size one.

    Raises:
        BadInputError: another model.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = autoencoder(model)
    vae = _built(config, device) if sizes else None
    report: dict[str, Any] = {
        "device": device,
        "threads": torch.get_num_threads(),
        "model": model,
        "times": [_timed(vae, size, repeats) for size in sizes],
        "peaks": [_peaks(config, size) for size in traced],
    }
    if model in _WITH_DEMO:
        report["differences"] = _differences(side or 1024)
    else:
        report["errors"] = _errors(config, side or 256)
    return written(report, lines, out)


def _built(config: dict[str, Any], device: str, dtype: torch.dtype = torch.float32) -> Any:
    return build_components({"vae": config}, dtype, device, only=("vae",))["vae"]


def _timed(vae: Any, size: int, repeats: int) -> dict[str, Any]:
    """Seconds of the plain decode, and the other ways' time over it: ratios of medians."""
    shape = _latent_shape(vae.config, size)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(vae.device)
    ways: dict[str, Settings] = {"plain": Settings(), **_exact(vae.config)}
    rounds = [[way for way in ways if way != _DEAR] for _ in range(repeats)]
    rounds[-1] += [_DEAR, "plain"] if _DEAR in ways else []
    times: dict[str, list[CallTime]] = {way: [] for way in ways}
    decode = functools.partial(_decode, vae, latents)
    with attached(vae, Settings(vae_tiles="exact")):
        _decode(vae, latents[..., :8, :8])  # libraries make themselves ready
    total, done = sum(map(len, rounds)), 0
    for turn in rounds:
        for way in turn:
            with attached(vae, ways[way]):
                times[way].append(time_call(decode, latents.device)[0])
            done += 1
            progress.report(f"{size}x{size}", done, total)
    seconds = {way: [one.seconds for one in taken] for way, taken in times.items()}
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    row = {"size": size, "plain_seconds": medians["plain"], "spreads": {way: spread(seconds[way]) for way in ways}}
    own = min(one.own for taken in times.values() for one in taken)
    return row | {kind: medians[kind] / medians["plain"] for kind in _exact(vae.config)} | {"own": own}


def _latent_shape(config: Mapping[str, Any], size: int) -> tuple[int, ...]:
    frames = (1,) if "z_dim" in config else ()
    return (1, config["z_dim" if frames else "latent_channels"], *frames, size // 8, size // 8)


def _exact(config: Mapping[str, Any]) -> dict[str, Settings]:
    """The ways to run an autoencoder by exact strips."""
    if "z_dim" in config:
        return {kind: Settings(vae_tiles="exact") for kind in _EXACT}
    return {kind: Settings(vae_tiles="exact", vae_map=kind) for kind in MAPS}


def _decode(vae: Any, latents: Tensor) -> None:
    with torch.no_grad():
        vae.decode(latents)


def _peaks(config: dict[str, Any], size: int) -> dict[str, Any]:
    """MiB that a decode in half precision holds on the device in addition to the weights, and in host memory."""
    vae = _built(config, "meta", torch.float16)
    latents = torch.empty(_latent_shape(config, size), dtype=torch.float16, device="meta")
    ways = {"plain": Settings(), **_exact(config)}
    row: dict[str, Any] = {"size": size}
    with torch.no_grad():
        for way, settings in ways.items():
            with attached(vae, settings):
                row[way] = _mib(trace(vae.decode, latents))
        with _tiled(vae, size):
            row[_THEIRS] = _mib(trace(vae.decode, latents))
    return row


def _mib(traced: Any) -> list[float]:
    return [traced.activation_peak_bytes / MIB, traced.host_peak_bytes / MIB]


@contextlib.contextmanager
def _tiled(vae: Any, side: int) -> Iterator[None]:
    """Turn on diffusers' tiles of at most 512 pixels for a picture of ``side`` pixels, within the block."""
    tile = min(512, side // 16 * 8)
    if "z_dim" in vae.config:
        tile, three = min(256, tile), min(256, tile) * 3 // 4
        vae.enable_tiling(tile, tile, three, three)
        yield
        vae.disable_tiling()
        return
    before = vae.tile_sample_min_size, vae.tile_latent_min_size
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // 8
    yield
    vae.disable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = before


def _errors(config: dict[str, Any], side: int) -> dict[str, float]:
    """The relative error of every way to decode what a full-size autoencoder with random weights made of a picture."""
    vae = _built(config, "cpu")
    with torch.no_grad():
        picture = _discs(side)
        latents = vae.encode(picture.unsqueeze(2) if "z_dim" in config else picture).latent_dist.mode()
        plain = vae.decode(latents).sample
        errors = {way: float((pixels - plain).norm() / plain.norm()) for way, pixels in _decoded(vae, latents)}
    errors.pop("fast tiles", None)  # a picture this small is one of them
    return errors


def _differences(side: int) -> list[dict[str, Any]]:
    """Differences of the demo autoencoder's 8-bit pictures from its plain decode."""
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(MODEL_PATH / "vae", torch_dtype=torch.float32).eval()
    rows = []
    with torch.no_grad():
        latents = vae.encode(_discs(side)).latent_dist.mode()
        plain = eight_bits(vae.decode(latents).sample / 2 + 0.5)
        for way, decoded in _decoded(vae, latents):
            rows.append(_difference(way, decoded, plain))
            progress.report("differences", len(rows), len(MAPS) + 2)
    return rows


def _decoded(vae: Any, latents: Tensor) -> Iterator[tuple[str, Tensor]]:
    for kind, settings in _exact(vae.config).items():
        with attached(vae, settings):
            yield f"exact tiles, {kind}" if kind in MAPS else "exact tiles", vae.decode(latents).sample
    if "z_dim" not in vae.config:
        with attached(vae, Settings(vae_tiles="fast")):
            yield "fast tiles", vae.decode(latents).sample
    with _tiled(vae, 8 * latents.shape[-1]):
        yield _THEIRS, vae.decode(latents).sample


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


def _difference(way: str, pixels: Tensor, plain: Tensor) -> dict[str, Any]:
    apart = (eight_bits(pixels / 2 + 0.5) - plain).abs()
    return {
        "way": way,
        "mean": float(apart.mean()),
        "most": int(apart.max()),
        "differing_percent": float((apart.amax(1) > 0).double().mean() * 100),
        "over_one_percent": float((apart.amax(1) > 1).double().mean() * 100),
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    yield from (f"# Ways to decode, by the autoencoder of {report['model']}", "")
    where = f"{report['device']}, {report['threads']} threads"
    yield f"Time of a full-size float32 decode by the autoencoder of {report['model']} on {where}; in brackets over"
    yield "that of the plain decode."
    yield ""
    kinds = tuple(_exact(autoencoder(report["model"])))
    yield from _by_size(report["times"], ("plain", *kinds), (_time_cells(row, kinds) for row in report["times"]))
    if report["peaks"]:
        yield from ("", "MiB held by a decode in half precision without the weights (and in host memory), traced", "")
        ways = ("plain", *kinds, _THEIRS)
        yield from _by_size(report["peaks"], ways, ([_two(*row[way]) for way in ways] for row in report["peaks"]))
    yield ""
    if "errors" in report:
        yield "Relative error to the plain decode, float32, random weights"
        yield ""
        yield from table(("way", "error"), ([way, f"{error:.1e}"] for way, error in report["errors"].items()))
        return
    yield "Difference from the plain decode, of 255, of one drawn picture by the demo autoencoder"
    yield ""
    heads = ("way", "mean", "most", "pixels off", "by more than 1")
    yield from table(heads, map(_difference_cells, report["differences"]))


def _by_size(rows: Sequence[dict[str, Any]], heads: Sequence[str], cells: Iterable[Iterable[str]]) -> Iterator[str]:
    return table(("size", *heads), ([f"{row['size']}", *more] for row, more in zip(rows, cells, strict=True)))


def _time_cells(row: dict[str, Any], kinds: Sequence[str]) -> Iterator[str]:
    """Cells with times of the plain decode, and of each way with its ratio to that; no times of a busy machine."""
    if not trusted(row):
        yield from ("", *[BUSY] * len(kinds))
        return
    plain, spreads = row["plain_seconds"], row.get("spreads", {})
    yield figure(plain, spreads.get("plain"), "{:.2f} s")
    for kind in kinds:
        yield f"{figure(row[kind] * plain, spreads.get(kind), '{:.2f} s')} ({row[kind]:.2f})"


def _difference_cells(row: dict[str, Any]) -> list[str]:
    percents = [f"{row[name]:.2f} %" for name in ("differing_percent", "over_one_percent")]
    return [row["way"], f"{row['mean']:.4f}", f"{row['most']}", *percents]


def _two(device: float, host: float) -> str:
    return f"{device:.0f} ({host:.0f})" if host else f"{device:.0f}"
