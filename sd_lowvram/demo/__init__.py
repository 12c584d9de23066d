"""The demo model: a small trained text-to-image model that ships with the package.

`MODEL_PATH` is a diffusers folder; README.md in this folder is its model card. `COLOURS_PATH` is the map from its
latents to the colours of previews.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).resolve().parent / "model"
COLOURS_PATH = MODEL_PATH.with_name("colours.json")

SIDE = 128
"""Pixels of the square pictures that it was trained on."""

__all__ = ["COLOURS_PATH", "MODEL_PATH", "SIDE"]
