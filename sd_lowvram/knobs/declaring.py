"""What declarations of knobs have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..knob import ANY, Act, Fidelity, Knob

BITWISE, ROUNDING, APPROXIMATE = Fidelity.BITWISE, Fidelity.ROUNDING, Fidelity.APPROXIMATE

ATTENDING, DENOISE, AUTOENCODER = ("control", "denoise", "decode", "encode"), ("denoise",), ("decode", "encode")
"""Stages: those whose models have attention, the denoiser's, and the autoencoder's."""

NOT_COMFYUI = ("cli", "panel")
"""For knobs that would act on what ComfyUI does itself: it shares one set of weights among all clones of a model and
keeps account of where they are and in which type; it runs every prompt in inference mode, and compiles by a node."""

STREAMED = ("blocks", "halves", "layer")
"""Values of ``offload`` with which weights pass through a ring."""

IN_BLOCKS = {Act.ACTS_IN_BLOCKS: ANY}
STATEFUL = IN_BLOCKS | {Act.KEEPS_STATE: ANY}
UNFOLLOWED = (Act.ACTS_IN_BLOCKS, Act.STREAMS_WEIGHTS, Act.WIDENS_WEIGHTS)
"""What no code that follows the model's Python, to compile or to trace it, can follow."""


def declared(**declaration: Any) -> Any:
    """A field of :class:`~sd_lowvram.settings.Settings`, undecided by default, with its :class:`~sd_lowvram.Knob`."""
    return dataclasses.field(default=None, metadata={"knob": Knob(**declaration)})
