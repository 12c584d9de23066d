"""Draws docs/tiles-crop.png: one crop of the test collage, decoded untiled, by exact tiles and by diffusers' tiling.

    python tools/tiles_crop.py --out docs/tiles-crop.png

The demo model's autoencoder encodes and decodes; tiles have 512 pixels. The crop is the one that tiles change most.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw, ImageFont

from sd_lowvram import Settings, attached
from sd_lowvram.demo import MODEL_PATH

COLLAGE = Path(__file__).resolve().parents[1] / "tests" / "data" / "collage.png"
SIDE, SCALE, LINE, TILE = 160, 2, 26, 512


def decoded() -> dict[str, np.ndarray]:
    """Way to decode -> the collage's pixels (height, width, 3)."""
    vae = AutoencoderKL.from_pretrained(MODEL_PATH, subfolder="vae", torch_dtype=torch.float32)
    pixels = np.asarray(Image.open(COLLAGE).convert("RGB"), dtype=np.float32) / 127.5 - 1
    found = {}
    with torch.inference_mode():
        latents = vae.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None]).latent_dist.mode()
        found["untiled"] = vae.decode(latents).sample
        with attached(vae, Settings(vae_tiles="exact", vae_map="parked")):
            found["exact tiles (ours)"] = vae.decode(latents).sample
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = TILE, TILE // 8
        found["diffusers tiling"] = vae.decode(latents).sample
    return {name: _pixels(picture[0]) for name, picture in found.items()}


def _pixels(picture: torch.Tensor) -> np.ndarray:
    return ((picture.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()


def worst_corner(one: np.ndarray, other: np.ndarray) -> tuple[int, int]:
    """Row and column of the crop in which the two differ most, in steps of a quarter of its side."""
    difference = np.abs(one.astype(int) - other).mean(axis=2)
    rows, columns = (range(0, size - SIDE + 1, SIDE // 4) for size in difference.shape)
    return max(
        ((row, column) for row in rows for column in columns),
        key=lambda at: difference[at[0] : at[0] + SIDE, at[1] : at[1] + SIDE].mean(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/tiles-crop.png"))
    out = parser.parse_args().out
    pictures = decoded()
    plain = pictures["untiled"]
    row, column = worst_corner(plain, pictures["diffusers tiling"])
    width = SIDE * SCALE
    page = Image.new("RGB", (len(pictures) * (width + 8) - 8, width + LINE), "white")
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(16)
    for number, (name, picture) in enumerate(pictures.items()):
        crop = Image.fromarray(picture[row : row + SIDE, column : column + SIDE])
        page.paste(crop.resize((width, width), Image.Resampling.NEAREST), (number * (width + 8), LINE))
        off = np.abs(plain.astype(int) - picture).max()
        draw.text(
            (number * (width + 8) + 2, 3), name if picture is plain else f"{name}: off by up to {off}", "black", font
        )
    page.save(out, optimize=True)
    print(f"{out}: rows from {row}, columns from {column}")


if __name__ == "__main__":
    main()
