"""Knobs of weights: their type and layout, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import APPROXIMATE, ATTENDING, BITWISE, DENOISE, NOT_COMFYUI, ROUNDING, STATEFUL, STREAMED, declare

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp16-storage", "autocast-fp16", "autocast-bf16", "fp16-products")


@dataclass(frozen=True, kw_only=True)
class WeightsKnobs:
    """Knobs of weights: their type and layout, and where they are stored."""

    precision: str | None = declare(
        place=0,
        label="Precision",
        help="number type: fp16 and bf16 use half the memory of fp32; fp16-storage does too and computes in fp32 "
        "(GTX 16xx); fp16-products computes products in fp16 and the rest in fp32 (RTX 20xx)",
        when="on a GPU that is too small or too slow for fp32; a narrower type gives another picture, a wider one "
        "needs more memory",
        choices=_PRECISIONS,
        fidelity=dict.fromkeys(_PRECISIONS, APPROXIMATE) | {"fp32": ROUNDING},
        surfaces=NOT_COMFYUI,
        hook="numbers.precision",
        depth=Depth.CONVERTS,
        acts={
            Act.WIDENS_WEIGHTS: ("fp16-storage", "fp16-products"),
            Act.HALVES_PRODUCTS: ("fp16-products",),
            Act.CONVERTS_WEIGHTS: ANY,
        },
    )
    channels_last: bool | None = declare(
        place=4,
        label="Channels last",
        help="another order of numbers in memory; faster on recent GPUs and processors",
        when="nearly always on a GPU; weights are copied once into that order",
        fidelity=ROUNDING,
        surfaces=NOT_COMFYUI,
        stages=ATTENDING,
        hook="numbers.channels_last",
        depth=Depth.CONVERTS,
        acts={Act.CONVERTS_WEIGHTS: ANY, Act.REORDERS_KERNELS: ANY},
    )
    offload: str | None = declare(
        place=11,
        opened_with="weights",
        label="Model in VRAM",
        help="part of the model that is in VRAM at once: all of it (none), one of its models (component), half a UNet "
        "(halves), the amount set below (blocks), or one layer (layer); the rest is loaded from RAM when it is needed",
        when="models larger than the budget; little time if copies run while the GPU works, and RAM for the weights",
        choices=("none", "component", "layer", "halves", "blocks"),
        fidelity=BITWISE,
        surfaces=NOT_COMFYUI,
        hook="parking.offload",
        depth=Depth.PLACES,
        acts={Act.PARKS_WEIGHTS: ("component", *STREAMED), Act.STREAMS_WEIGHTS: STREAMED, Act.KEEPS_STATE: STREAMED}
        | {Act.PLACES_WEIGHTS: ANY, Act.MOVES_MODELS: ("component",), Act.STREAMS_LAYERS: ("layer",)},
    )
    weights_mib: int | None = declare(
        place=17,
        opened_with="weights",
        label="Model in VRAM, up to",
        help="hold this much of the model in VRAM and load the rest from RAM when it is needed; less is slower",
        when="a budget below the model's size; copies, which cost no time if the work before them takes as long",
        maximum=1048576,
        unit="MiB",
        fidelity=BITWISE,
        surfaces=NOT_COMFYUI,
        implies={"offload": "blocks"},
        acts={Act.PLACES_WEIGHTS: ANY},
    )
    split_layers: bool | None = declare(
        place=18,
        label="Split layers",
        help="load a layer in parts if it is larger than the memory set aside for it",
        when="budgets below the largest layer; more, smaller copies",
        fidelity=ROUNDING,
        surfaces=NOT_COMFYUI,
        acts={Act.PLACES_WEIGHTS: ANY},
    )
    weight_storage: str | None = declare(
        place=19,
        label="Model in 8 bits",
        help="store the model in 8 bits, half the memory of fp16, and convert each layer when it is used",
        when="models whose weights are too large for GPU and bus; another picture, and time to convert each layer",
        choices=("fp8", "int8"),
        fidelity=APPROXIMATE,
        surfaces=NOT_COMFYUI,
        stages=("denoise", "text"),
        hook="numbers.weight_storage",
        depth=Depth.CONVERTS,
        acts=STATEFUL | dict.fromkeys((Act.WIDENS_WEIGHTS, Act.CONVERTS_WEIGHTS, Act.COMPRESSES_WEIGHTS), ANY),
    )
    packed_weights: bool | None = declare(
        place=27,
        opened_with="strips",
        label="Weights in the processor's order",
        help="on a processor, also store large weights in the order in which they are read, instead of copying them in "
        "every step; faster for small pictures, needs more memory",
        when="processors and small pictures; a second copy of large weights",
        fidelity=ROUNDING,
        surfaces=NOT_COMFYUI,
        stages=DENOISE,
        hook="numbers.packed_weights",
        depth=Depth.CONVERTS,
        acts={Act.COPIES_WEIGHTS: ANY},
        excludes=dict.fromkeys((Act.STREAMS_WEIGHTS, Act.WIDENS_WEIGHTS), ANY),
    )
