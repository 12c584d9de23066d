"""Knobs of weights: their type and layout, and where they are stored."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import APPROXIMATE, ATTENDING, BITWISE, DENOISE, NOT_COMFYUI, ROUNDING, STATEFUL, STREAMED, declared

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp16-storage", "autocast-fp16", "autocast-bf16", "fp16-products")


@dataclass(frozen=True, kw_only=True)
class WeightsKnobs:
    """Knobs of weights: their type and layout, and where they are stored."""

    precision: str | None = declared(
        place=0,
        label="Precision",
        help="how finely numbers are kept: fp16 and bf16 take half the memory of fp32; fp16-storage keeps half "
        "the memory and computes in fp32 (GTX 16xx); autocast-fp16 and autocast-bf16 are slower than fp16 and bf16; "
        "fp16-products makes a transformer's products in fp16 but where they overflow, and all else in fp32 (RTX 20xx)",
        when="on a card that is too small or too slow for fp32; a narrower type is another picture, a wider "
        "one more memory",
        choices=_PRECISIONS,
        fidelity=dict.fromkeys(_PRECISIONS, APPROXIMATE) | {"fp32": ROUNDING},
        surfaces=NOT_COMFYUI,
        hook="precision",
        depth=Depth.CONVERTS,
        acts={Act.WIDENS_WEIGHTS: ("fp16-storage", "fp16-products")},
    )
    channels_last: bool | None = declared(
        place=4,
        label="Channels last",
        help="another layout of the picture in memory; faster on recent cards and processors",
        when="nearly always on a GPU; weights are copied once into the other order",
        fidelity=ROUNDING,
        surfaces=NOT_COMFYUI,
        stages=ATTENDING,
        hook="channels_last",
        depth=Depth.CONVERTS,
    )
    offload: str | None = declared(
        place=11,
        label="Model on the card",
        help="how much of the model is on the card at once: all of it (none), one of its models (component), "
        "half a UNet (halves), as much as weights_mib says while the rest comes when needed (blocks), or "
        "one layer (layer)",
        when="models larger than the budget; little time where copies hide under the compute, and host memory "
        "for the weights",
        choices=("none", "component", "layer", "halves", "blocks"),
        fidelity=BITWISE,
        surfaces=NOT_COMFYUI,
        hook="offload",
        depth=Depth.PLACES,
        acts={Act.PARKS_WEIGHTS: ("component", *STREAMED), Act.STREAMS_WEIGHTS: STREAMED, Act.KEEPS_STATE: STREAMED},
    )
    weights_mib: int | None = declared(
        place=17,
        label="Keep of the model on the card",
        help="keep this much of the model on the card and fetch the rest from RAM when it is needed; the less, "
        "the slower",
        when="a budget below the model's size; copies, which hide where the work before them takes as long",
        maximum=1048576,
        unit="MiB",
        fidelity=BITWISE,
        surfaces=NOT_COMFYUI,
        implies={"offload": "blocks"},
    )
    split_layers: bool | None = declared(
        place=18,
        label="Split layers",
        help="fetch layers in parts where they are larger than the room for them",
        when="budgets below the largest layer; more, smaller copies",
        fidelity=ROUNDING,
        surfaces=NOT_COMFYUI,
    )
    weight_storage: str | None = declared(
        place=19,
        label="Model in 8 bits",
        help="keep the model in 8 bits, half the memory of fp16, and widen each layer when it is used",
        when="models whose weights are too large for card and bus; another picture, and time to widen each layer",
        choices=("fp8", "int8"),
        fidelity=APPROXIMATE,
        surfaces=NOT_COMFYUI,
        stages=("denoise", "text"),
        hook="weight_storage",
        depth=Depth.CONVERTS,
        acts=STATEFUL | {Act.WIDENS_WEIGHTS: ANY},
    )
    packed_weights: bool | None = declared(
        place=27,
        label="Keep weights in order",
        help="on a processor, also keep large weights in the order that its kernels read, into which they are else "
        "copied at every step; faster for small pictures, and more memory",
        when="processors and small pictures; a second copy of large weights",
        fidelity=ROUNDING,
        surfaces=NOT_COMFYUI,
        stages=DENOISE,
        hook="packed_weights",
        depth=Depth.CONVERTS,
        acts={Act.COPIES_WEIGHTS: ANY},
        excludes=dict.fromkeys((Act.STREAMS_WEIGHTS, Act.WIDENS_WEIGHTS), ANY),
    )
