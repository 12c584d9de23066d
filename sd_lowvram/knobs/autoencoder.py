"""Knobs of the autoencoder: how pictures are decoded and encoded."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import AUTOENCODER, BITWISE, ROUNDING, declare


@dataclass(frozen=True, kw_only=True)
class AutoencoderKnobs:
    """Knobs of the autoencoder: how pictures are decoded and encoded."""

    vae_slices: bool | None = declare(
        place=6,
        label="Decode one by one",
        help="decode and encode the pictures of a batch one after the other",
        when="batches; one after the other takes somewhat longer",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook="pieces.vae_slices",
        depth=Depth.SLICES,
    )
    vae_tiles: str | None = declare(
        place=7,
        opened_with="strips",
        label="Decode in parts",
        help="exact: strips that fit together without seams or colour shift",
        when="large pictures, if the decode needs most; exact takes little time while the unfinished picture is held",
        choices=("off", "exact"),
        fidelity={"off": BITWISE, "exact": ROUNDING},
        stages=AUTOENCODER,
        hook={"off": "pieces.vae_whole", "exact": "pieces.vae_exact"},
        depth=Depth.TILES,
        acts={Act.MAKES_STRIPS: ("exact",)},
    )
    vae_map: str | None = declare(
        place=8,
        opened_with="maps",
        closed="held",
        label="Unfinished picture",
        help="place of the unfinished picture while exact strips are made: held in VRAM, parked in RAM, or recomputed, "
        "which needs no memory and more time",
        when="held halves the memory of a plain decode, parked needs RAM and copies, recomputed takes far longer",
        choices=("held", "parked", "recomputed"),
        fidelity=ROUNDING,
        stages=AUTOENCODER,
    )
    vae_strip_mib: int | None = declare(
        place=9,
        opened_with="strips",
        label="Memory for a strip",
        help="memory for one exact strip of the decode; less is slower",
        when="if a strip needs most; less memory means more strips, which take longer",
        maximum=1024,
        unit="MiB",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
    )
    decoder_device: str | None = declare(
        place=10,
        opened_with="decoder",
        closed="gpu",
        label="Decode on",
        help="decode on the GPU (gpu), on the processor (cpu), or on the processor only if VRAM is too small (auto)",
        when="if the decode fits no other way; a processor takes many times as long",
        choices=("gpu", "cpu", "auto"),
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook={"cpu": "parking.offload"},
        undecided=("auto",),
        depth=Depth.PLACES,
        acts={Act.ON_PROCESSOR: ("cpu",)},
    )
    winograd: bool | None = declare(
        place=28,
        label="Fewer multiplications (Winograd)",
        help="decode and encode with fewer multiplications on a processor, in fp32; faster on most",
        when="decodes on a processor in fp32; memory for the transformed strips",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook="numbers.winograd",
        depth=Depth.COMPUTES,
        acts={Act.ACTS_IN_DECODER: ANY},
    )
    vae_fused_kernels: bool | None = declare(
        place=30,
        label="Fused kernels of the autoencoder",
        help="fused kernels when decoding and encoding; without a choice here, the same as in the steps",
        when="NVIDIA GPUs on which `doctor --calibrate` measured a gain for decodes alone; compiling once",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook="numbers.fused_kernels",
        depth=Depth.COMPUTES,
        acts={Act.ACTS_IN_DECODER: ANY, Act.FUSES: ANY},
    )
