"""Into which parts the denoiser's calls are divided, and what waits in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import BITWISE, DENOISE, IN_BLOCKS, ROUNDING, STATEFUL, declared


@dataclass(frozen=True, kw_only=True)
class ActivationsKnobs:
    """Into which parts the denoiser's calls are divided, and what waits in host memory."""

    feed_forward_chunks: int | None = declared(
        place=12,
        label="Feed-forward in parts",
        help="work through the model's widest layers in this many parts; less memory for large pictures",
        when="large pictures, where the widest layers are the peak; a little time",
        maximum=1024,
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="feed_forward",
        depth=Depth.DIVIDES,
        acts=IN_BLOCKS,
    )
    residual_strips: int | None = declared(
        place=13,
        label="Convolutions in strips",
        help="work through the model's convolutions in this many strips of the picture; less memory for large pictures",
        when="large pictures, where convolutions are the peak; some time for the rows that strips share",
        maximum=1024,
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="residual_strips",
        depth=Depth.DIVIDES,
        acts=STATEFUL,
    )
    transformer_chunks: int | None = declared(
        place=14,
        label="Transformers in parts",
        help="work through the model's transformers in this many parts of the picture; less memory for large pictures",
        when="large pictures, where transformers are the peak; a little time",
        maximum=1024,
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="transformer_chunks",
        depth=Depth.DIVIDES,
        acts=STATEFUL,
    )
    park_skips: bool | None = declared(
        place=15,
        label="Wait in RAM",
        help="activations that the model needs only later (skip connections) wait in RAM; with guidance in turn, so do "
        "those of the half that is not being computed",
        when="large pictures; host memory and copies, most of which hide under the compute",
        fidelity=BITWISE,
        stages=DENOISE,
        hook="skip_parking",
        depth=Depth.PARKS,
        acts=STATEFUL | {Act.COPIES_TO_HOST: ANY},
    )
    guidance_in_turn: bool | None = declared(
        place=16,
        label="Guidance in turn",
        help="prompt and negative prompt one after the other inside the model, so that only one takes memory for "
        "the picture",
        when="wherever guidance doubles the batch; halves that are too small for the card take longer than both "
        "at once",
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="guidance_in_turn",
        depth=Depth.GUIDES,
        acts=STATEFUL,
    )
    largest_mib: int | None = declared(
        place=20,
        label="Largest piece",
        help="take no more memory than this in one piece, for cards that have such a limit",
        when="cards and drivers that refuse large pieces; smaller strips and parts, which take longer",
        maximum=1048576,
        unit="MiB",
        fidelity=BITWISE,
        stages=(),
    )
