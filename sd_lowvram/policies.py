"""Policies: the memory management of other programs in our knobs, by name, with their pace and what differs.

Plain values: ``Settings.policy(name)`` makes settings of them. Sources: the published sources of CompVis'
stable-diffusion, basujindal's and consciencia's forks of it, and the documentation of diffusers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import BadInputError, SettingsError

_ONE_HEAD_MIB = 32
"""Scores of one attention head of SD1.5 at 512x512 in fp16."""

_PLAIN: dict[str, Any] = {
    "channels_last": False,
    "inference_mode": False,
    "vae_slices": False,
    "vae_tiles": "off",
    "decoder_device": "gpu",
    "offload": "none",
    "feed_forward_chunks": 1,
    "residual_strips": 1,
    "transformer_chunks": 1,
    "park_skips": False,
    "guidance_in_turn": False,
    "fused_kernels": False,
    "vae_fused_kernels": False,
    "cuda_graphs": False,
    "compile": "off",
    "packed_weights": False,
    "winograd": False,
}
"""Every knob that a plan would choose, decided: nothing is done for memory or speed."""

_COMPVIS = _PLAIN | {"attention": "sliced", "attention_mib": 65536}
_TURBO = _PLAIN | {
    "attention": "sliced",
    "attention_mib": _ONE_HEAD_MIB,
    "offload": "component",
    "guidance_in_turn": True,
    "vae_slices": True,
}
_HALVES = {"offload": "halves"}
_FLASH = {"attention": "sdpa", "attention_mib": None}
_CONSCIENCIA = _TURBO | _FLASH | {"decoder_device": "cpu"}
_DIFFUSERS = _PLAIN | {"attention": "sdpa"}
_LAYER = _DIFFUSERS | {"offload": "layer"}


@dataclass(frozen=True)
class Pace:
    """Slowdown of a program compared with today's programs and with our streaming.

    Attributes:
        launches: factor for the launch of an operator, on named GPUs.
        arithmetic: factor for operations in 16 bits, on named GPUs.
        layer: host time of a call of a layer whose weights are moved, in launches; None: that of our engine.
        overlaps: True if weights are copied while the GPU computes.
        fitted: True if a published or measured time of the program itself was used to fit the figures.
        first_seconds: by which its first picture took longer in published runs on an RTX 2070; None: not published.
    """

    launches: float = 1.0
    arithmetic: float = 1.0
    layer: float | None = None
    overlaps: bool = True
    fitted: bool = False
    first_seconds: float | None = None


OURS = Pace()


@dataclass(frozen=True)
class Policy:
    """A program's memory management in our knobs.

    Attributes:
        stands_for: description of the program.
        deviates: differences between the knobs and the program.
        knobs: decided knobs by name; the plan chooses the rest.
        own: True if it runs by diffusers' own calls and the knobs serve plans alone.
        needs_plan: True if a run needs a plan for its size and budget.
        pace: slowdown of the program.
    """

    stands_for: str
    deviates: str
    knobs: Mapping[str, Any]
    own: bool = False
    needs_plan: bool = False
    pace: Pace = OURS


WHOLE = Pace(layer=0.0)
"""A program of today that moves whole models."""

FORKS = Pace(launches=3.4, arithmetic=1.4965, layer=0.0)
FITTED = dataclasses.replace(FORKS, fitted=True)
"""Slowdown of CompVis' program and its forks, fitted, with the CPU that decodes, to the published times of 39 square
pictures on an RTX 2070, by three of the forks. They run under autocast, whose casts are not in our traces, with torch
and Windows of 2022, whose convolutions used a smaller share of a GPU. A constant time per picture was fitted too and is
zero."""

SEQUENTIAL = Pace(layer=30.5, overlaps=False, fitted=True)
GROUPS = Pace(layer=8.8, fitted=True)
"""A synchronisation and an allocation for each layer, by one step each of SD1.5 at 1024x1024 on an H100: 519 ms with
diffusers' sequential offload, 161 ms with its groups by leaf."""

POLICIES: dict[str, Policy] = {
    "compvis": Policy(
        "CompVis as published: all weights on the device, attention with its whole matrix of scores",
        "weights in the type that they were loaded in, not float32 under autocast. A published time is 1.3 times as "
        "long",
        _COMPVIS,
        pace=dataclasses.replace(FORKS, first_seconds=6.66),
    ),
    "basujindal": Policy(
        "basujindal's fork: one model on the device at a time, the UNet in two halves, guidance in turn, attention in "
        "parts, one picture decoded at a time",
        f"parts of attention are bounded at {_ONE_HEAD_MIB} MiB, one head at 512x512, where the fork takes one head at "
        "any size; guidance goes in turn inside each block, and weights come ahead of their turn. Published times are "
        "1.7 to 2.5 times as long",
        _TURBO | _HALVES,
        pace=dataclasses.replace(FORKS, first_seconds=6.73),
    ),
    "basujindal-turbo": Policy(
        "basujindal's fork with --turbo: as basujindal, the UNet whole on the device while it samples",
        "as basujindal, the weights apart",
        _TURBO,
        pace=dataclasses.replace(FITTED, first_seconds=6.61),
    ),
    "consciencia": Policy(
        "consciencia's fork: as basujindal, with xformers' attention and the decoder on the CPU",
        "torch's own kernels of the same kind in place of xformers' (--attention xformers takes those)",
        _CONSCIENCIA | _HALVES,
        pace=FORKS,
    ),
    "consciencia-turbo": Policy(
        "consciencia's fork with --turbo: the UNet whole on the device while it samples",
        "as consciencia",
        _CONSCIENCIA,
        pace=dataclasses.replace(FITTED, first_seconds=4.33),
    ),
    "consciencia-modified": Policy(
        "consciencia's fork with --turbo and the decoder back on the GPU",
        "as consciencia",
        _CONSCIENCIA | {"decoder_device": "gpu"},
        pace=dataclasses.replace(FITTED, first_seconds=7.52),
    ),
    "diffusers-default": Policy("diffusers as it loads a model", "in nothing", _DIFFUSERS),
    "diffusers-model-offload": Policy(
        "diffusers' enable_model_cpu_offload(), by its own call",
        "plans count our offload=component in its place",
        _DIFFUSERS | {"offload": "component"},
        own=True,
        pace=WHOLE,
    ),
    "diffusers-sequential": Policy(
        "diffusers' enable_sequential_cpu_offload(), by its own call",
        "plans count the memory of our offload=layer, and for each layer the host time that was measured on an H100",
        _LAYER,
        own=True,
        pace=SEQUENTIAL,
    ),
    "diffusers-group": Policy(
        "diffusers' enable_group_offload() by leaf with a stream, by its own call",
        "as diffusers-sequential",
        _LAYER,
        own=True,
        pace=GROUPS,
    ),
    "ours": Policy("the plan of sd-lowvram: the fastest lossless settings that fit", "in nothing", {}, needs_plan=True),
}


HELP = "Imitate another program, for comparison; plan --list-policies lists them."
"""Help text of the option."""


def policy(name: str) -> Policy:
    """The policy ``name``.

    Raises:
        SettingsError: there is none of this name.
    """
    if name not in POLICIES:
        raise SettingsError(f"--policy {name[:60]!r} is unknown: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def check_policy(name: str | None, device_type: str) -> None:
    """Raise BadInputError where the policy ``name`` cannot run on a device of this type."""
    if name is not None and policy(name).own and device_type == "cpu":
        raise BadInputError(
            f"--policy {name} needs an accelerator: diffusers moves weights to a GPU by it, and this runs on the CPU. "
            "Choose another policy, or predict it: sd-lowvram plan --policy "
            f"{name} --gpu rtx2070"
        )
