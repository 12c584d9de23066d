"""Knobs of the autoencoder: how pictures are decoded and encoded."""

from __future__ import annotations

from dataclasses import dataclass

from ..knob import ANY, Act, Depth
from .declaring import APPROXIMATE, AUTOENCODER, BITWISE, ROUNDING, declared


@dataclass(frozen=True, kw_only=True)
class AutoencoderKnobs:
    """Knobs of the autoencoder: how pictures are decoded and encoded."""

    vae_slices: bool | None = declared(
        place=6,
        label="Decode one by one",
        help="decode and encode the pictures of a batch one after the other",
        when="batches; each picture is decoded by itself, which takes somewhat longer",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook="vae_slices",
        depth=Depth.SLICES,
    )
    vae_tiles: str | None = declared(
        place=7,
        label="Decode in parts",
        help="exact: strips that know the whole picture, no seam and no colour shift; fast: overlapping tiles, "
        "blended, which may show",
        when="large pictures, whose decode is the peak; exact takes little time while its map is held, fast "
        "less and changes tone and seams",
        choices=("off", "exact", "fast"),
        fidelity={"off": BITWISE, "exact": ROUNDING, "fast": APPROXIMATE},
        stages=AUTOENCODER,
        hook={"off": "vae_whole", "exact": "vae_exact", "fast": "vae_fast"},
        depth=Depth.TILES,
    )
    vae_map: str | None = declared(
        place=8,
        label="Decoding waits",
        help="where the unfinished picture waits while exact strips are made: held on the card, parked in RAM, "
        "or recomputed, which takes no memory and more time",
        when="held halves the plain peak, parked takes host memory and copies, recomputed several times the time",
        choices=("held", "parked", "recomputed"),
        fidelity=ROUNDING,
        stages=AUTOENCODER,
    )
    vae_strip_mib: int | None = declared(
        place=9,
        label="Memory for a strip",
        help="how much of the picture is decoded at once by exact strips",
        when="where a strip is the peak; the smaller, the more often layers are called",
        maximum=1024,
        unit="MiB",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
    )
    decoder_device: str | None = declared(
        place=10,
        label="Decode on",
        help="what makes the finished picture: the card (gpu), the processor (cpu), or the processor only where "
        "the card cannot hold it (auto)",
        when="where the decode fits no other way; a processor takes many times as long",
        choices=("gpu", "cpu", "auto"),
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook={"cpu": "offload"},
        undecided=("auto",),
        depth=Depth.PLACES,
    )
    winograd: bool | None = declared(
        place=28,
        label="Winograd convolutions",
        help="make and read pictures with fewer multiplications, on a processor: faster on most, and only in fp32",
        when="decodes on a processor in fp32; memory for the transformed strips",
        fidelity=ROUNDING,
        stages=AUTOENCODER,
        hook="winograd",
        depth=Depth.COMPUTES,
        acts={Act.ACTS_IN_DECODER: ANY},
    )
