"""A linear map from latents to colours, fitted to an autoencoder.

A pixel of the latents represents a square of the picture, and the square's mean colour is nearly a linear function of
its few channels. The map is fitted by least squares to the autoencoder's own encoding of drawn pictures, so that no
table of known models is needed. Source of the idea: the tables in the hosts' previews.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache import place_of, recall, remember
from ..demo import COLOURS_PATH

_PICTURES, _SIDE = 24, 128
_SHAPES_BEFORE_WHITE, _SHAPES_BEFORE_A_RAMP = 3, 12


@dataclass(frozen=True)
class Colours:
    """The map.

    Attributes:
        rows: red, green and blue from -1 to 1 for each channel of the unscaled latents, and a last row that is added.
        explained: the share of the drawn squares' variance that it explains, up to 1.
    """

    rows: tuple[tuple[float, ...], ...]
    explained: float

    def convert(self, latents: Tensor) -> Tensor:
        """Colours (N, H, W, 3) of unscaled latents (N, C, H, W), in uint8 and on the CPU."""
        colours = _append_one(latents) @ torch.tensor(self.rows, device=latents.device)
        return colours.add(1).mul(127.5).round().clamp(0, 255).byte().cpu()


def colours_of(vae: Any, facts: Callable[[], Any]) -> Colours:
    """The map of a diffusers autoencoder, fitted once and cached.

    Args:
        facts: identifies the autoencoder.
    """
    place = place_of("previews", facts)
    try:
        return read(recall(place))
    except (KeyError, TypeError, ValueError):  # nothing, or something else
        colours = fit(vae)
        remember(place, colours)
        return colours


def demo_colours() -> Colours:
    """The map of the demo model, which is shipped with it."""
    return read(json.loads(COLOURS_PATH.read_text(encoding="utf-8")))


def read(value: Any) -> Colours:
    """A map as JSON knows it.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    rows = tuple(tuple(float(number) for number in row) for row in value["rows"])
    if {len(row) for row in rows} != {3} or not all(math.isfinite(number) for row in rows for number in row):
        raise ValueError("no map to three colours")
    return Colours(rows, float(value["explained"]))


def fit(vae: Any) -> Colours:
    """The map that comes nearest to what ``vae`` (diffusers' AutoencoderKL) makes of drawn pictures.

    Its encoder is copied in float32 for the time; ``vae`` stays as it is.
    """
    encoder, moments = copy.deepcopy(vae.encoder).float(), copy.deepcopy(vae.quant_conv)
    encoded, squares = [], []
    with torch.inference_mode():
        for picture in drawn_pictures():
            latents = encoder(picture)
            latents = (latents if moments is None else moments.float()(latents)).chunk(2, dim=1)[0]
            encoded.append(_append_one(latents).flatten(0, 2))
            squares.append(torch.nn.functional.adaptive_avg_pool2d(picture, latents.shape[2:])[0].flatten(1).T)
        inputs, wanted = torch.cat(encoded).double(), torch.cat(squares).double()
        rows = torch.linalg.lstsq(inputs, wanted).solution
        missed = (wanted - inputs @ rows).var(dim=0).sum() / wanted.var(dim=0).sum()
    return Colours(tuple(tuple(row) for row in rows.tolist()), 1 - float(missed))


def drawn_pictures() -> list[Tensor]:
    """Pictures (1, 3, side, side) from -1 to 1: coloured discs and boxes, before white and before ramps of colour."""
    generator = torch.Generator().manual_seed(0)
    return [_draw(number % 4 == 0, generator) for number in range(_PICTURES)]


def _draw(before_a_ramp: bool, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    y, x = torch.meshgrid(*2 * [torch.linspace(-1, 1, _SIDE)], indexing="ij")
    picture = torch.ones(3, _SIDE, _SIDE)
    if before_a_ramp:
        angle, first, last = uniform(0, 2 * math.pi), uniform(-1, 1, 3, 1, 1), uniform(-1, 1, 3, 1, 1)
        share = (x * angle.cos() + y * angle.sin()) / math.sqrt(8) + 0.5
        picture = torch.lerp(first, last, share)
    for number in range(_SHAPES_BEFORE_A_RAMP if before_a_ramp else _SHAPES_BEFORE_WHITE):
        (left, top), (wide, high), colour = uniform(-1, 1, 2), uniform(0.05, 0.55, 2), uniform(-1, 1, 3, 1, 1)
        power = 2 if number % 2 else 12  # a disc, or a box with round corners
        inside = ((x - left) / wide).abs() ** power + ((y - top) / high).abs() ** power < 1
        picture = torch.where(inside, colour * (0.8 + 0.2 * (x - left) / wide), picture)
    return picture.clamp(-1, 1)[None]


def _append_one(latents: Tensor) -> Tensor:
    """Latents (N, C, H, W) as float32 (N, H, W, C + 1): the last channel is one."""
    channels = latents.float().permute(0, 2, 3, 1)
    return torch.cat([channels, torch.ones_like(channels[..., :1])], dim=-1)
