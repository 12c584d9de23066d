"""The ways to run a stage, as ladders: each rung slower than the one before, and smaller."""

from __future__ import annotations

from typing import Any

DENOISE_LADDER: list[dict[str, Any]] = [
    {},
    {"feed_forward_chunks": 4},
    {"feed_forward_chunks": 8, "residual_strips": 8, "transformer_chunks": 8},
    {"feed_forward_chunks": 8, "residual_strips": 8, "transformer_chunks": 8, "park_skips": True},
    {
        "feed_forward_chunks": 16,
        "residual_strips": 16,
        "transformer_chunks": 16,
        "park_skips": True,
        "guidance_in_turn": True,
    },
]
DECODE_LADDER: list[dict[str, Any]] = [
    {"vae_tiles": "off"},
    {"vae_tiles": "exact", "vae_map": "held"},
    {"vae_tiles": "exact", "vae_map": "parked"},
    {"vae_tiles": "exact", "vae_map": "recomputed"},
    {"vae_tiles": "exact", "vae_map": "parked", "vae_strip_mib": 4},
]


def choices(stage: str, decoder_on_cpu: bool) -> list[dict[str, Any]]:
    """The rungs of a stage, the fastest first."""
    if stage == "denoise":
        return DENOISE_LADDER
    if stage in ("decode", "encode"):
        on_cpu = [{"vae_tiles": "off", "decoder_device": "cpu"}] if decoder_on_cpu else []
        return [*DECODE_LADDER, *on_cpu]
    return [{}]
