"""The ways to run each stage: ladders on which each rung does more work than the one before, and holds less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..settings import Settings
from .plan import StagePlan
from .stages import Stage

Choice = dict[str, Any]
"""Knobs of one stage, by name."""

Option = tuple[StagePlan, ...]
"""One way to run the stages that share knobs (decode and encode do), with what each takes."""

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
DECODE_LADDER: list[Choice] = [
    {"vae_tiles": "off"},
    {"vae_tiles": "exact", "vae_map": "held"},
    {"vae_tiles": "exact", "vae_map": "parked"},
    {"vae_tiles": "exact", "vae_map": "parked", "vae_strip_mib": 4},
]
_WITHOUT_HOST = {"vae_tiles": "exact", "vae_map": "recomputed"}
_ON_CPU = {"vae_tiles": "off", "decoder_device": "cpu"}


@dataclass(frozen=True)
class Group:
    """Stages that share knobs.

    Attributes:
        ladder: what they may be run with; each rung is slower than the one before and smaller on the device.
        detours: ways beside it, slower than its first rung: for want of host memory, or where copies are slow.
    """

    stages: tuple[Stage, ...]
    ladder: list[Choice]
    detours: list[Choice]

    @property
    def name(self) -> str:
        return self.stages[0].name


def groups(stages: Iterable[Stage], fixed: Settings, tiled: bool, decoder_on_cpu: bool) -> list[Group]:
    """The stages of a run, those together that share knobs, with what ``fixed`` leaves open of the ways to run them.

    Args:
        tiled: whether the autoencoder is built so that exact tiles can run it.
        decoder_on_cpu: whether it may run in host memory.
    """
    shared: dict[str, list[Stage]] = {}
    for stage in stages:
        shared.setdefault("vae" if stage.name in ("encode", "decode") else stage.name, []).append(stage)
    ladders = {"denoise": DENOISE_LADDER, "vae": DECODE_LADDER if tiled else DECODE_LADDER[:1]}
    beside = {"vae": [_WITHOUT_HOST] * tiled + [_ON_CPU] * decoder_on_cpu}
    found = []
    for name, members in shared.items():
        ladder = _open(ladders.get(name, [{}]), fixed)
        detours = [choice for choice in _open(beside.get(name, []), fixed) if choice not in ladder]
        found.append(Group(tuple(members), ladder, detours))
    return found


def _open(choices: list[Choice], fixed: Settings) -> list[Choice]:
    """What ``fixed`` leaves open of ``choices``, each once."""
    taken = [{name: value for name, value in one.items() if getattr(fixed, name) is None} for one in choices]
    return [one for number, one in enumerate(taken) if one not in taken[:number]]


def seconds_of(option: Option) -> float:
    return sum(stage.seconds for stage in option)


def peak_of(option: Option) -> int:
    return max(stage.peak_bytes for stage in option)


def host_of(option: Option) -> int:
    return max(stage.host_bytes for stage in option)


def largest_of(option: Option) -> int:
    return max(stage.largest_bytes for stage in option)


def parks(option: Option) -> bool:
    """Whether maps wait in host memory."""
    return any(stage.parked_bytes for stage in option)
