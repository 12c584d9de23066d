"""Common parts of knob declarations."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..knob import ANY, Act, Fidelity, Knob

BITWISE, ROUNDING, APPROXIMATE = Fidelity.BITWISE, Fidelity.ROUNDING, Fidelity.APPROXIMATE

ATTENDING, DENOISE, AUTOENCODER = ("control", "denoise", "decode", "encode"), ("denoise",), ("decode", "encode")
"""Stages: those whose models have attention, the denoiser's, and the autoencoder's."""

NOT_COMFYUI = ("cli", "panel")
"""Surfaces of knobs whose work ComfyUI does itself. It shares one set of weights among all clones of a model and tracks
their place and type; it runs every prompt in inference mode, and compiles by a node."""

STREAMED = ("blocks", "halves", "layer")
"""Values of ``offload`` with which weights pass through a ring."""

IN_BLOCKS = {Act.ACTS_IN_BLOCKS: ANY}
STATEFUL = IN_BLOCKS | {Act.KEEPS_STATE: ANY}
UNFOLLOWED = (Act.ACTS_IN_BLOCKS, Act.STREAMS_WEIGHTS, Act.WIDENS_WEIGHTS)
"""Behaviours that prevent compiling or tracing the model's Python."""


def declare(**declaration: Any) -> Any:
    """A field of :class:`~sd_lowvram.settings.Settings`, undecided by default, with its :class:`~sd_lowvram.Knob`."""
    return dataclasses.field(default=None, metadata={"knob": Knob(**declaration)})
