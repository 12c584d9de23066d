"""Knobs of attention: how queries are compared with keys."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import ATTENDING, IN_BLOCKS, ROUNDING, declare


@dataclass(frozen=True, kw_only=True)
class AttentionKnobs:
    """Knobs of attention: how queries are compared with keys."""

    attention: str | None = declare(
        place=1,
        label="Attention",
        help="way to compute attention, in which all parts of the picture see each other: sdpa picks the fastest "
        "kernel; sliced and fused-softmax limit its memory",
        when="large pictures, if attention needs most; sliced takes more time, fused-softmax even more",
        choices=("sdpa", "flash", "efficient", "xformers", "fused-softmax", "sliced", "triton", "cudnn"),
        fidelity=ROUNDING,
        stages=ATTENDING,
        hook="numbers.attention",
        depth=Depth.COMPUTES,
        acts=IN_BLOCKS | {Act.OWN_WORKSPACE: ("cudnn",)},
    )
    attention_mib: int | None = declare(
        place=2,
        label="Memory for attention",
        help="most memory that sliced and fused-softmax use for attention at once; less is slower",
        when="if sliced or fused-softmax still use too much; less is slower",
        maximum=65536,
        unit="MiB",
        fidelity=ROUNDING,
        stages=ATTENDING,
    )
    deterministic: bool | None = declare(
        place=3,
        label="Same bits in every run",
        help="the same seed gives the same bits in every run: only attention that proved it on this machine",
        when="if pictures are compared bit by bit; a slower kernel if the fastest does not repeat its bits",
        fidelity=ROUNDING,
        stages=ATTENDING,
        hook="numbers.attention",
        depth=Depth.COMPUTES,
        acts=IN_BLOCKS | {Act.COPIES_TO_HOST: ANY},  # it asks the device which kernel proved itself
    )
