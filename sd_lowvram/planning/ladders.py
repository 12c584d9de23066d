"""The ways to run a stage, as ladders: each rung does more work than the one before, and holds less."""

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
    {"vae_tiles": "exact", "vae_map": "parked", "vae_strip_mib": 4},
]
_WITHOUT_HOST = {"vae_tiles": "exact", "vae_map": "recomputed"}
_ON_CPU = {"vae_tiles": "off", "decoder_device": "cpu"}


def ladder(stage: str, tiled: bool = True) -> list[dict[str, Any]]:
    """The rungs of a stage: the first is the fastest, the last the smallest on the device.

    Args:
        tiled: whether the autoencoder is built so that exact tiles can run it.
    """
    decode = DECODE_LADDER if tiled else DECODE_LADDER[:1]
    return {"denoise": DENOISE_LADDER, "decode": decode, "encode": decode}.get(stage, [{}])


def detours(stage: str, tiled: bool, decoder_on_cpu: bool) -> list[dict[str, Any]]:
    """Ways beside the ladder, slower than its first rung: for want of host memory or where copies are slow."""
    if stage not in ("decode", "encode"):
        return []
    return [_WITHOUT_HOST] * tiled + [_ON_CPU] * decoder_on_cpu
