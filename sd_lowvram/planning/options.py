"""The ways to run each stage, in tiers: each does more work than the one before, and holds less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..hooks.compiled import is_followed
from ..settings import Settings, conflict
from .stages import Stage

Choice = dict[str, Any]
"""Knobs of one stage, by name."""

DENOISE_LADDER: list[Choice] = [
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
PACKED: Choice = {"packed_weights": True}
_PLAIN: Choice = {"vae_tiles": "off"}
_ON_CPU: Choice = {"vae_tiles": "off", "decoder_device": "cpu"}
_HELD, _PARKED, _RECOMPUTED = ({"vae_tiles": "exact", "vae_map": where} for where in ("held", "parked", "recomputed"))
_FINEST: Choice = _PARKED | {"vae_strip_mib": 4}


@dataclass(frozen=True)
class Group:
    """Stages that share knobs.

    Attributes:
        tiers: the ways to run them. Those of one tier are slower than those of the tier before; which of them is the
            fastest hangs on the device.
        smallest: the one of them that holds least on the device.
    """

    stages: tuple[Stage, ...]
    tiers: list[list[Choice]]
    smallest: Choice

    @property
    def choices(self) -> list[Choice]:
        return [choice for tier in self.tiers for choice in tier]


def groups(
    stages: Iterable[Stage],
    fixed: Settings,
    tiled: bool,
    decoder_on_cpu: bool,
    packs: bool = False,
    by_winograd: bool = False,
) -> list[Group]:
    """The stages of a run, those together that share knobs, with what ``fixed`` leaves open of the ways to run them.

    Args:
        tiled: whether the autoencoder is built so that exact tiles can run it.
        decoder_on_cpu: whether it may run in host memory.
        packs: whether the denoiser's weights may be kept in the order of a CPU's kernels.
        by_winograd: whether the autoencoder may convolve by Winograd's ways, in any of the others.
    """
    shared: dict[str, list[Stage]] = {}
    for stage in stages:
        shared.setdefault("vae" if stage.name in ("encode", "decode") else stage.name, []).append(stage)
    away = [_ON_CPU] * decoder_on_cpu
    exact = [[_HELD], [_PARKED, _FINEST, _RECOMPUTED, *away]]
    vae = [[_PLAIN], *exact] if tiled else [[_PLAIN], away]
    if by_winograd:
        vae = [[*tier, *(choice | {"winograd": True} for choice in tier)] for tier in vae]
    tiers = {"denoise": [[PACKED]] * packs + [[choice] for choice in DENOISE_LADDER], "vae": vae}
    smallest = {"denoise": DENOISE_LADDER[-1], "vae": _FINEST if tiled else _PLAIN}
    return [
        Group(tuple(members), _open(tiers.get(name, [[{}]]), fixed), _left(smallest.get(name, {}), fixed))
        for name, members in shared.items()
    ]


def goes_with(choice: Choice, base: Settings) -> bool:
    """Whether ``choice`` can be taken with the weights placed and stored, and the blocks compiled, as ``base`` says."""
    if conflict(base.filled(**choice)) is not None:
        return False
    # Compiling was measured without packed weights, and kernels take them in fp32 alone.
    return not choice.get("packed_weights") or (base.precision in (None, "fp32") and not is_followed(base))


def _left(choice: Choice, fixed: Settings) -> Choice:
    """What ``fixed`` leaves open of ``choice``."""
    return {name: value for name, value in choice.items() if getattr(fixed, name) is None}


def _open(tiers: list[list[Choice]], fixed: Settings) -> list[list[Choice]]:
    """What ``fixed`` leaves open of the ways, each once."""
    found: list[list[Choice]] = []
    for tier in tiers:
        known = [choice for one in found for choice in one]
        left = [_left(choice, fixed) for choice in tier]
        found.append([one for number, one in enumerate(left) if one not in [*known, *left[:number]]])
    return [tier for tier in found if tier]
