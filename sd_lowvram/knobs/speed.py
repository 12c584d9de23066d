"""Knobs of speed: the same work faster, or less of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import (
    APPROXIMATE,
    AUTOENCODER,
    BITWISE,
    DENOISE,
    IN_BLOCKS,
    NOT_COMFYUI,
    ROUNDING,
    UNFOLLOWED,
    declared,
)


@dataclass(frozen=True, kw_only=True)
class SpeedKnobs:
    """Knobs of speed: the same work faster, or less of it."""

    inference_mode: bool | None = declared(
        place=5,
        label="Inference mode",
        help="run the model without what only training needs",
        when="always, unless gradients are wanted; it costs nothing",
        fidelity=BITWISE,
        surfaces=NOT_COMFYUI,
        hook="inference_mode",
    )
    fused_kernels: bool | None = declared(
        place=21,
        label="Fused kernels",
        help="norms together with their activations in one pass over the picture, by kernels in Triton (NVIDIA)",
        when="NVIDIA cards, where `doctor --calibrate` measured a gain; compiling once",
        fidelity=ROUNDING,
        stages=("denoise", *AUTOENCODER),
        hook="fused_kernels",
        depth=Depth.COMPUTES,
        acts=IN_BLOCKS,
    )
    deep_cache: int | None = declared(
        place=22,
        label="Deep features every",
        help="compute the model's deep layers only every so many steps and use their results again between; "
        "the more, the faster and the farther from the picture",
        when="many steps of a sampler; another picture, and memory for what is kept",
        minimum=2,
        maximum=100,
        unit="steps",
        fidelity=APPROXIMATE,
        stages=DENOISE,
        hook="deep_cache",
        depth=Depth.SKIPS,
        acts={Act.SKIPS_LAYERS: ANY, Act.KEEPS_STATE: ANY},
        excludes={Act.STREAMS_WEIGHTS: ANY},
    )
    deep_cache_branch: int | None = declared(
        place=23,
        label="Layers between deep features",
        help="how many of the model's outer layers run at every step; more come nearer to the picture and take longer",
        when="with deep_cache; the more, the nearer and the slower",
        minimum=0,
        maximum=100,
        fidelity=APPROXIMATE,
        stages=DENOISE,
    )
    compile: str | None = declared(
        place=25,
        label="Compile",
        help="have torch.compile make code for each kind of block (regional) or for the model as one (whole): the "
        "first picture takes longer, all others are made faster",
        when="many pictures of one size; a warm-up of seconds to minutes, and a C++ compiler or Triton",
        choices=("off", "regional", "whole"),
        fidelity=dict.fromkeys(("regional", "whole"), ROUNDING) | {"off": BITWISE},
        surfaces=NOT_COMFYUI,
        stages=("denoise", *AUTOENCODER),
        hook=dict.fromkeys(("regional", "whole"), "compiled"),
        depth=Depth.COMPILES,
        acts={Act.REPLAYS: ("regional", "whole")},
        excludes=dict.fromkeys(UNFOLLOWED, ("regional", "whole"))
        | {Act.ACTS_IN_DECODER: ("regional", "whole"), Act.SKIPS_LAYERS: ("whole",)},
    )
    traced: bool | None = declared(
        place=26,
        label="Traced",
        help="have torch write down once what the model does, keep that in the cache folder, and run it without "
        "Python; needs no compiler",
        when="small pictures, where Python is the slower part; a pass to write down for each size, once",
        fidelity=ROUNDING,
        surfaces=("cli",),  # the hosts' own code acts between its layers, which a traced pass would not call
        stages=DENOISE,
        hook="traced",
        depth=Depth.REPLAYS,
        acts={Act.REPLAYS: ANY},
        excludes=dict.fromkeys(
            (*UNFOLLOWED, Act.PARKS_WEIGHTS, Act.SKIPS_LAYERS, Act.COPIES_WEIGHTS, Act.REPLAYS), ANY
        ),
    )
    cuda_graphs: bool | None = declared(
        place=29,
        label="CUDA graphs",
        help="record what the model does on an NVIDIA card once and replay it: faster where starting each operation "
        "takes longer than the operation",
        when="small pictures on fast cards, where launching takes longer than computing; memory for the recordings",
        fidelity=BITWISE,
        surfaces=("cli",),  # the hosts' own code acts between its layers, which a recorded pass would not call
        stages=DENOISE,
        hook="cuda_graphs",
        depth=Depth.REPLAYS,
        acts={Act.REPLAYS: ANY},
        excludes=dict.fromkeys((Act.COPIES_TO_HOST, Act.SKIPS_LAYERS, Act.WIDENS_WEIGHTS, Act.PARKS_WEIGHTS), ANY),
    )
