"""The ways to run each stage, in tiers: each does more work than the one before, and holds less.

They are made of what the hooks offer (:mod:`sd_lowvram.hooks.offers`); no knob is named here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..hooks.offers import Offer, OfferKind, left_open, select_kind
from ..models.calls import Stage
from ..settings import Settings, conflict

Choice = dict[str, Any]
"""Knobs of a stage by name."""


@dataclass(frozen=True)
class Group:
    """Stages that share knobs, and the ways to run them.

    Attributes:
        tiers: the ways to run them, in tiers. Ways of a later tier are slower; which way of a tier is fastest depends
            on the device.
        smallest: the way that holds least on the device.
        offers: the offers from which the ways are made.
    """

    stages: tuple[Stage, ...]
    tiers: list[list[Choice]]
    smallest: Choice
    offers: Sequence[Offer] = ()

    @property
    def choices(self) -> list[Choice]:
        """All ways to run the stages, from the fastest tier on."""
        return [choice for tier in self.tiers for choice in tier]

    def goes_with(self, choice: Choice, base: Settings) -> bool:
        """True if ``choice`` is compatible with the knobs of the whole run."""
        settings = base.filled(**choice)
        taken = [offer for offer in self.offers if offer.knobs.items() <= choice.items()]
        return conflict(settings) is None and all(offer.goes_with(settings) for offer in taken)


@dataclass(frozen=True, eq=False)
class WeightPlacement:
    """A way to place the weights.

    Attributes:
        mib_knob: the knob for which the search finds a number of MiB; "": none.
        least: True if no other way holds less on the device.
    """

    knobs: Choice
    mib_knob: str
    least: bool


def weight_ways(offers: Iterable[Offer], fixed: Settings) -> list[WeightPlacement]:
    """Return all ways to place the weights: each offer of a knob combined with the offers of the other knobs.

    Args:
        offers: of all hooks.
        fixed: decided knobs; offers that contradict them are left out.
    """
    by_knob: dict[str, list[Offer]] = {}
    for offer in select_kind(offers, OfferKind.WEIGHTS):
        if all(value is None or getattr(fixed, name) in (None, value) for name, value in offer.knobs.items()):
            by_knob.setdefault(next(iter(offer.knobs)), []).append(offer)
    placements: dict[tuple[Any, ...], WeightPlacement] = {}
    for taken in itertools.product(*by_knob.values()):
        knobs = {name: value for offer in taken for name, value in left_open(offer.knobs, fixed).items()}
        mib_knob = "".join(offer.mib_knob for offer in taken)
        placements.setdefault(
            tuple(knobs.items()), WeightPlacement(knobs, mib_knob, any(offer.least for offer in taken))
        )
    return list(placements.values())


def groups(stages: Iterable[Stage], fixed: Settings, offers: Sequence[Offer]) -> list[Group]:
    """Put stages that share offers together.

    Args:
        stages: of a run, in order.
        fixed: decided knobs.
        offers: of all hooks.

    Returns:
        Groups, each with the ways to run it that ``fixed`` leaves open.
    """
    shared: list[tuple[list[Stage], list[Offer]]] = []
    for stage in stages:
        mine = [offer for offer in offers if stage.name in offer.stages]
        group = next((group for group, its in shared if its and its == mine), None)
        if group is None:
            shared.append(([stage], mine))
        else:
            group.append(stage)
    return [_group(tuple(members), fixed, mine) for members, mine in shared]


def _group(stages: tuple[Stage, ...], fixed: Settings, offers: list[Offer]) -> Group:
    tiers: dict[int, list[Choice]] = {}
    for offer in select_kind(offers, OfferKind.INSTEAD):
        tiers.setdefault(offer.level, []).append(dict(offer.knobs))
    least = next((dict(offer.knobs) for offer in select_kind(offers, OfferKind.INSTEAD) if offer.least), {})
    levels = ladder(offers)
    tiers.setdefault(0, [{}])
    for level, choice in levels.items():
        tiers.setdefault(level, []).append(choice)
        least = choice
    for extra in select_kind(offers, OfferKind.BESIDE):
        tiers = {level: [*tier, *({**choice, **extra.knobs} for choice in tier)] for level, tier in tiers.items()}
    ways = [tiers[level] for level in sorted(tiers)]
    return Group(stages, _open(ways, fixed), left_open(least, fixed), offers)


def ladder(offers: Iterable[Offer]) -> dict[int, Choice]:
    """Accumulate the combined offers up to each level; of several offers for a knob the last counts."""
    climbing = sorted(select_kind(offers, OfferKind.LADDER), key=lambda offer: offer.level)
    levels: dict[int, Choice] = {}
    choice: Choice = {}
    for offer in climbing:
        choice = {**choice, **offer.knobs}
        levels[offer.level] = choice
    return levels


def _open(tiers: list[list[Choice]], fixed: Settings) -> list[list[Choice]]:
    """Ways that ``fixed`` allows, each once."""
    open_choices: list[list[Choice]] = []
    for tier in tiers:
        chosen = [choice for option in open_choices for choice in option]
        left = [left_open(choice, fixed) for choice in tier]
        open_choices.append([choice for number, choice in enumerate(left) if choice not in [*chosen, *left[:number]]])
    return [tier for tier in open_choices if tier]
