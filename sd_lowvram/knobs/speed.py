"""Knobs of speed: the same work faster, or less of it."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import (
    AUTOENCODER,
    BITWISE,
    DENOISE,
    IN_BLOCKS,
    NOT_COMFYUI,
    ROUNDING,
    UNFOLLOWED,
    declare,
)


@dataclass(frozen=True, kw_only=True)
class SpeedKnobs:
    """Knobs of speed: the same work faster, or less of it."""

    inference_mode: bool | None = declare(
        place=5,
        label="Inference mode",
        help="run the model without the records that only training needs",
        when="always, unless you need gradients; costs nothing",
        fidelity=BITWISE,
        surfaces=NOT_COMFYUI,
        hook="numbers.inference_mode",
    )
    fused_kernels: bool | None = declare(
        place=21,
        label="Fused kernels",
        help="compute several small operations in one pass over the picture, with Triton (NVIDIA GPUs)",
        when="NVIDIA GPUs on which `doctor --calibrate` measured a gain; compiling once",
        fidelity=ROUNDING,
        stages=("denoise", *AUTOENCODER),
        hook="numbers.fused_kernels",
        depth=Depth.COMPUTES,
        acts=IN_BLOCKS | {Act.FUSES: ANY},
    )
    compile: str | None = declare(
        place=25,
        opened_with="strips",
        label="Compile",
        help="compile the model with torch.compile, by kinds of blocks (regional) or as one (whole): the first picture "
        "takes longer, later ones may be faster",
        when="many pictures of one size; a warm-up of seconds to minutes, and a C++ compiler or Triton",
        choices=("off", "regional", "whole"),
        fidelity=dict.fromkeys(("regional", "whole"), ROUNDING) | {"off": BITWISE},
        surfaces=NOT_COMFYUI,
        stages=("denoise", *AUTOENCODER),
        hook=dict.fromkeys(("regional", "whole"), "replay.compiled"),
        depth=Depth.COMPILES,
        acts={Act.REPLAYS: ("regional", "whole")},
        excludes=dict.fromkeys(UNFOLLOWED, ("regional", "whole"))
        | {Act.ACTS_IN_DECODER: ("regional", "whole"), Act.SKIPS_LAYERS: ("whole",)},
    )
    traced: bool | None = declare(
        place=26,
        opened_with="strips",
        label="Traced",
        help="record the model's operations once for each size, store them in the cache folder, and run them without "
        "Python; needs no compiler",
        when="small pictures, if Python is the slower part; one pass to record for each size",
        fidelity=ROUNDING,
        surfaces=("cli",),  # the hosts' own code acts between its layers, which a traced pass would not call
        stages=DENOISE,
        hook="replay.traced",
        depth=Depth.REPLAYS,
        acts={Act.REPLAYS: ANY},
        excludes=dict.fromkeys(
            (*UNFOLLOWED, Act.PARKS_WEIGHTS, Act.SKIPS_LAYERS, Act.COPIES_WEIGHTS, Act.REPLAYS), ANY
        ),
    )
    cuda_graphs: bool | None = declare(
        place=29,
        opened_with="strips",
        label="CUDA graphs",
        help="record the model's operations on an NVIDIA GPU once and replay them: faster if starting an operation "
        "takes longer than the operation",
        when="small pictures on fast GPUs, if launching takes longer than computing; memory for the recordings",
        fidelity=BITWISE,
        surfaces=("cli",),  # the hosts' own code acts between its layers, which a recorded pass would not call
        stages=DENOISE,
        hook="replay.cuda_graphs",
        depth=Depth.REPLAYS,
        acts={Act.REPLAYS: ANY, Act.RECORDS: ANY},
        excludes=dict.fromkeys((Act.COPIES_TO_HOST, Act.SKIPS_LAYERS, Act.WIDENS_WEIGHTS, Act.PARKS_WEIGHTS), ANY),
    )
    streamed_graphs: bool | None = declare(
        place=31,
        label="CUDA graphs of streamed steps",
        help="record a step with weights that are loaded while it runs, and replay it on an NVIDIA GPU: the processor "
        "starts no single copies and operations",
        when="streamed weights on fast GPUs, without a budget: no plan knows the memory of the recordings",
        fidelity=BITWISE,
        surfaces=(),  # no plan takes it
        stages=DENOISE,
        hook="parking.offload",
        depth=Depth.PLACES,
        acts={Act.REPLAYS: ANY, Act.RECORDS: ANY},
        excludes=dict.fromkeys((Act.COPIES_TO_HOST, Act.SKIPS_LAYERS, Act.WIDENS_WEIGHTS, Act.REPLAYS), ANY),
        implies={"offload": "blocks"},
    )
