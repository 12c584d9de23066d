"""Knobs of attention: how queries are compared with keys."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import APPROXIMATE, ATTENDING, DENOISE, IN_BLOCKS, ROUNDING, STATEFUL, declared


@dataclass(frozen=True, kw_only=True)
class AttentionKnobs:
    """Knobs of attention: how queries are compared with keys."""

    attention: str | None = declared(
        place=1,
        label="Attention",
        help="how parts of the picture look at each other: sdpa takes the fastest kernel for the size and the "
        "card; sliced and fused-softmax bound the memory that this takes",
        when="large pictures, where the scores are the peak; sliced takes more time, fused-softmax more still",
        choices=("sdpa", "flash", "efficient", "xformers", "fused-softmax", "sliced", "triton", "cudnn"),
        fidelity=ROUNDING,
        stages=ATTENDING,
        hook="attention",
        depth=Depth.COMPUTES,
        acts=IN_BLOCKS,
    )
    attention_mib: int | None = declared(
        place=2,
        label="Memory for attention",
        help="the most that sliced and fused-softmax take for attention at once",
        when="where sliced or fused-softmax still take too much; the less, the slower",
        maximum=65536,
        unit="MiB",
        fidelity=ROUNDING,
        stages=ATTENDING,
    )
    deterministic: bool | None = declared(
        place=3,
        label="Deterministic",
        help="same seed, same picture to the last bit, run after run: only attention that proved it on this machine",
        when="where pictures are compared bit by bit; a slower kernel where the fastest does not repeat its bits",
        fidelity=ROUNDING,
        stages=ATTENDING,
        hook="attention",
        depth=Depth.COMPUTES,
        acts=IN_BLOCKS | {Act.COPIES_TO_HOST: ANY},  # it asks the device which kernel proved itself
    )
    merge_tokens: int | None = declared(
        place=24,
        label="Merge alike",
        help="let up to so much of the picture's parts that are alike go through self-attention as one; "
        "the more, the faster and the farther from the picture",
        when="large pictures, whose self-attention takes most of the time; another picture",
        maximum=75,
        unit="%",
        fidelity=APPROXIMATE,
        stages=DENOISE,
        hook="merge_tokens",
        depth=Depth.COMPUTES,
        acts=STATEFUL,
    )
