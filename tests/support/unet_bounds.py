"""What the smallest settings may hold of the activations of SD1.5's full-size UNet in fp16, whatever its family."""

from __future__ import annotations

import dataclasses

from sd_lowvram import Settings
from sd_lowvram.units import MIB

SMALLEST = dataclasses.replace(
    Settings.smallest(), offload=None, vae_slices=None, vae_tiles=None, vae_map=None, vae_strip_mib=None,
    channels_last=True,
)  # fmt: skip
"""In the plain order cuDNN holds copies of a convolution's weight, too, which is 30 MB."""
BOUNDS = {512: 32 * MIB, 2048: 320 * MIB, 4096: 1280 * MIB}
"""By the side of the picture in pixels."""
