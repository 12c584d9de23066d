"""Offers: settings that a hook proposes to a plan for a target; the search chooses by cost.

A hook's file has a function ``offers(target) -> Iterator[Offer]``; a registered hook has it as an attribute. A target
without sites gets no offer, and is still planned.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..devices.performance import MEASURED_GAINS, THIS, Rates
from ..devices.this_machine import RECORDED, kernel_gains
from ..kernels.triton import support as triton
from ..models.anatomy import Anatomy
from ..settings import Settings, conflict, knobs


class OfferKind(enum.Enum):
    """Way in which an offer is combined with other offers."""

    ALWAYS = "in every run in which nothing excludes it"
    WEIGHTS = "one of several ways to store the weights"
    WHOLE = "for a whole run, or not, with weights stored in any way"
    LADDER = "from its level on, with the offers of other knobs up to that level"
    INSTEAD = "one of several ways to run a stage, in the tier of its level"
    BESIDE = "with any way to run a stage, or not"
    LATE = "in place of other knobs in a stage of its level, if the budget costs time"


@dataclass(frozen=True)
class Offer:
    """Knobs that a hook offers to decide.

    Attributes:
        level: for ways to run a stage, a higher level means more work and fewer bytes. For late offers, the level that
            a run must have reached.
        stages: stages that it changes, if it is about single stages.
        least: True if no other way to run these stages, or to place the weights, holds less.
        mib_knob: for a way to place the weights, the knob with the MiB of weights on the device, if the search is to
            find that number.
        goes_with: function that checks compatibility with all other decided knobs, beyond what knobs declare.
    """

    kind: OfferKind
    knobs: Mapping[str, Any]
    level: int = 0
    stages: tuple[str, ...] = ()
    least: bool = False
    mib_knob: str = ""
    goes_with: Callable[[Settings], bool] = field(default=lambda _: True)

    def is_late_in(self, offers: Iterable[Offer], settings: Settings) -> bool:
        """True if ``settings`` have reached the level of this late offer among ``offers``."""
        steps = (step for step in select_kind(offers, OfferKind.LADDER) if step.level <= self.level)
        return all(getattr(settings, name) is not None for step in steps for name in step.knobs)


@dataclass(frozen=True)
class Target:
    """The target of a plan.

    Attributes:
        batch: pictures at a time.
        fixed: decided knobs.
        approximate: True if another picture, however close, is allowed.
    """

    anatomy: Anatomy
    device: torch.device
    rates: Rates
    batch: int
    fixed: Settings
    approximate: bool

    @property
    def on_gpu(self) -> bool:
        """True if the plan is for a device that is not the CPU."""
        return self.device.type != "cpu"

    @property
    def here(self) -> bool:
        """True if the plan is for this machine."""
        return self.rates.name == THIS

    def is_faster(self, *kernels: str) -> bool:
        """Return True if each of these was measured to be faster on the planned device; without names, all measured.

        On this machine each was measured at every shape. A named GPU has the figures of its generation, if there are
        any, and this machine's Triton does not matter to it.
        """
        if self.on_gpu and self.device.type != "cuda":
            return False
        if self.here and kernels and kernels != (RECORDED,) and triton.why_not(self.device):
            return False
        known = kernel_gains(self.device) if self.here else MEASURED_GAINS.get(self.rates.name, {})
        gains = [gain for name, gain in known.items() if name.startswith(kernels or "")]
        return bool(gains) and min(gains) > 1


def select_kind(offers: Iterable[Offer], kind: OfferKind) -> list[Offer]:
    """Offers of one kind, in their order."""
    return [offer for offer in offers if offer.kind is kind]


def left_open(offered: Mapping[str, Any], fixed: Settings) -> dict[str, Any]:
    """Knobs of ``offered`` that ``fixed`` leaves undecided."""
    return {name: value for name, value in offered.items() if getattr(fixed, name) is None}


def add_offers(settings: Settings, offers: Iterable[Offer]) -> Settings:
    """Add offers to ``settings``, except those that a decided knob excludes.

    Args:
        settings: with the knobs that are decided.
        offers: in the order in which they are tried: of several for one knob the first is taken.

    Returns:
        Settings in which no two knobs exclude each other, if none did before.
    """
    for offer in offers:
        more = settings.filled(**offer.knobs)
        if more != settings and conflict(more) is None and offer.goes_with(more):
            settings = more
    return settings


def drop_undecided(settings: Settings) -> Settings:
    """``settings`` without values that leave their knob to the plan."""
    left = {name: None for name, value in settings.as_dict().items() if value in knobs()[name].undecided}
    return dataclasses.replace(settings, **left)
