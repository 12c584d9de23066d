"""One generation: plan, attach, and take everything off again, at the latest before the next one.

The host queues its generations, so at most one is under way. It does not tell of those that fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sd_lowvram.guard import guard
from sd_lowvram.planner import Plan, Request, make_plan
from sd_lowvram.rates import rates_of
from sd_lowvram.session import Attachment, anatomy_of, attach, detach
from sd_lowvram.settings import Settings

from . import host
from .arguments import settings_of


@dataclasses.dataclass(frozen=True)
class Picture:
    """What a generation makes: pixels, pictures at a time, steps, and whether guidance doubles and pictures are
    encoded."""

    width: int
    height: int
    batch: int
    steps: int
    guidance: bool = True
    encodes: bool = False


_attached: list[tuple[Any, Attachment]] = []


def foretell(model: Any, chosen: Mapping[str, Any], picture: Picture) -> Plan:
    """The fastest settings that fit, attaching nothing.

    Raises:
        BudgetError: nothing fits. BadInputError: knobs or sizes that cannot be used.
    """
    where = host.device()
    request = Request(
        width=picture.width,
        height=picture.height,
        batch=picture.batch,
        vram=host.budget(chosen["vram"], model, where),
        ram=host.host_budget(chosen["ram"]),
        device=where,
        rates=rates_of(where),
        steps=picture.steps,
        guidance=picture.guidance,
        encodes=picture.encodes,
    )
    return make_plan(anatomy_of(model), request, _planned(model, settings_of(chosen)))


def _planned(model: Any, settings: Settings) -> Settings:
    """The knobs as the plan gets them: weights that the host moves come component by component."""
    if not host.moves_weights(model):
        return settings
    theirs = dict.fromkeys(host.WEIGHTS)
    return dataclasses.replace(settings, **theirs | {"offload": "component", "decoder_device": "gpu"})


def start(model: Any, chosen: Mapping[str, Any], picture: Picture) -> tuple[Plan, Attachment]:
    """Plan and attach. A larger picture (a hires fix) is planned anew before its first step, or refused there.

    Raises:
        BudgetError: nothing fits. BadInputError, NoSiteError, ConflictError: see the core's ``optimize``.
    """
    plan = foretell(model, chosen, picture)
    stop()
    attachment = attach(model, _attachable(model, plan.settings), plan.request.device)
    attachment.plan = plan
    _attached.append((model, attachment))

    def replan(width: int, height: int, batch: int) -> None:
        start(model, chosen, dataclasses.replace(picture, width=width, height=height, batch=batch))

    attachment.add(guard(attachment.anatomy, plan.request, replan))
    return plan, attachment


def _attachable(model: Any, settings: Settings) -> Settings:
    """The knobs as they are attached: weights that are on the device, or that the host moves, are left alone."""
    if host.moves_weights(model) or settings.offload == "none":
        settings = dataclasses.replace(settings, offload=None)
    if host.moves_weights(model):
        settings = dataclasses.replace(settings, decoder_device=None)
    return settings


def stop() -> None:
    """Take everything off, bit for bit; nothing happens when nothing is attached."""
    while _attached:
        detach(*_attached.pop())


def current() -> Attachment | None:
    """What is attached now."""
    return _attached[-1][1] if _attached else None
