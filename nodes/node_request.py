"""What a node was asked for, and the plans made from it; the host moves weights, so the plan's placement is advice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sd_lowvram.devices.info import available_ram
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.planning.request import request_for
from ..sd_lowvram.planning.search import make_plan
from ..sd_lowvram.settings import Settings, knobs
from . import host


@dataclass(frozen=True)
class Wish:
    """A budget as it was written, and the knobs that are fixed."""

    budget: str
    settings: Settings

    def plan(
        self,
        anatomy: Anatomy,
        device: torch.device,
        width: int,
        height: int,
        batch: int,
        *,
        passes: int | None = None,
        encodes: bool = False,
    ) -> Plan:
        """The fastest settings that fit.

        Raises:
            BudgetError: nothing fits; it tells the smallest budget that does.
            BadInputError: a size or a budget that cannot be used.
        """
        request = request_for(
            anatomy,
            vram=host.budget(self.budget, device),
            ram=available_ram(),
            width=width,
            height=height,
            batch=batch,
            passes=passes,
            encodes=encodes,
            device=device,
        )
        return make_plan(anatomy, request, dataclasses.replace(self.settings, channels_last=False))


def attachable(settings: Settings) -> Settings:
    """``settings`` without the knobs that the host, or a node of ours, answers for by other means than hooks."""
    theirs = [name for name, knob in knobs().items() if "node" not in knob.surfaces]
    return dataclasses.replace(settings, **dict.fromkeys([*theirs, "decoder_device", "largest_mib"]))


@dataclass(eq=False)
class Record:
    """What plans foretold and what their runs took; travels from node to node as LOWVRAM_PLAN.

    Attributes:
        plans: the latest for each stage, by its name: "denoise", "decode", "encode".
        measured: the latest run of each stage, as the allocator saw it.
        sites: on how many sites each hook acted in the latest call of the UNet.
    """

    plans: dict[str, Plan] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
