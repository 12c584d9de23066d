"""The demo model: a small trained text-to-image model that ships with the package.

`MODEL_PATH` is a diffusers folder; README.md beside this file is its model card.
"""

from pathlib import Path

MODEL_PATH = Path(__file__).resolve().parent / "model"

__all__ = ["MODEL_PATH"]
