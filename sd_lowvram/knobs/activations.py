"""Parts into which the denoiser's calls are divided, and data that waits in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import BITWISE, DENOISE, IN_BLOCKS, ROUNDING, STATEFUL, declare


@dataclass(frozen=True, kw_only=True)
class ActivationsKnobs:
    """Parts into which the denoiser's calls are divided, and data that waits in host memory."""

    feed_forward_chunks: int | None = declare(
        place=12,
        opened_with="strips",
        label="Widest layers in parts",
        help="compute the model's widest layers in this many parts; less memory for large pictures",
        when="large pictures, if the widest layers need most; a little time",
        maximum=1024,
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="pieces.feed_forward",
        depth=Depth.DIVIDES,
        acts=IN_BLOCKS,
    )
    residual_strips: int | None = declare(
        place=13,
        opened_with="strips",
        label="Convolutions in strips",
        help="compute the model's convolutions in this many strips of the picture; less memory for large pictures",
        when="large pictures, if convolutions need most; some time for the rows that strips share",
        maximum=1024,
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="pieces.residual_strips",
        depth=Depth.DIVIDES,
        acts=STATEFUL,
    )
    transformer_chunks: int | None = declare(
        place=14,
        opened_with="strips",
        label="Transformers in parts",
        help="compute the model's transformers in this many parts of the picture; less memory for large pictures",
        when="large pictures, if transformers need most; a little time",
        maximum=1024,
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="pieces.transformer_chunks",
        depth=Depth.DIVIDES,
        acts=STATEFUL,
    )
    park_skips: bool | None = declare(
        place=15,
        opened_with="maps",
        closed=False,
        label="Wait in RAM",
        help="move intermediate results that the model needs only later (skip connections) to RAM; with guidance in "
        "turn also those of the half that is not being computed",
        when="large pictures; RAM, and copies that mostly run while the GPU works",
        fidelity=BITWISE,
        stages=DENOISE,
        hook="parking.skip_parking",
        depth=Depth.PARKS,
        acts=STATEFUL | {Act.COPIES_TO_HOST: ANY},
    )
    guidance_in_turn: bool | None = declare(
        place=16,
        opened_with="strips",
        label="Guidance in turn",
        help="compute prompt and negative prompt one after the other, so that only one of them needs memory",
        when="wherever guidance doubles the batch; halves that are too small for the GPU take longer than both at once",
        fidelity=ROUNDING,
        stages=DENOISE,
        hook="pieces.guidance_in_turn",
        depth=Depth.GUIDES,
        acts=STATEFUL,
    )
    largest_mib: int | None = declare(
        place=20,
        label="Largest piece of memory",
        help="use no more memory than this in one piece, for GPUs that have such a limit",
        when="GPUs and drivers that refuse large pieces; smaller strips and parts, which take longer",
        maximum=1048576,
        unit="MiB",
        fidelity=BITWISE,
        stages=(),
    )
