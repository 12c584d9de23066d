"""One generation: plan, attach, and take everything off again, at the latest before the next one.

The host queues its generations, so at most one is under way. It does not tell of those that fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from sd_lowvram.errors import BudgetError
from sd_lowvram.planning.plan import Plan
from sd_lowvram.planning.replan import guard
from sd_lowvram.planning.request import request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import Attachment, attach, detach
from sd_lowvram.settings import Settings
from sd_lowvram.units import format_size

from . import host
from .arguments import settings_of
from .memory_estimate import lowered


@dataclasses.dataclass(frozen=True)
class Picture:
    """What a generation makes: pixels, pictures at a time, steps, passes of guidance for each picture, and whether
    pictures are encoded."""

    width: int
    height: int
    batch: int
    steps: int
    passes: int = 2
    encodes: bool = False

    @property
    def pixels(self) -> int:
        """Of all pictures at a time."""
        return self.width * self.height * self.batch


@dataclasses.dataclass(frozen=True)
class _Running:
    model: Any
    chosen: Mapping[str, Any]
    picture: Picture
    attachment: Attachment
    undo: contextlib.ExitStack


_running: list[_Running] = []


def foretell(model: Any, chosen: Mapping[str, Any], picture: Picture) -> Plan:
    """The fastest settings that fit, attaching nothing. Budget and peak count what the host's other modules hold.

    Args:
        model: the host's model, or a blueprint of one.

    Raises:
        BudgetError: nothing fits. BadInputError: knobs or sizes that cannot be used.
    """
    where = host.device()
    anatomy = host.anatomy(model)
    vram, others = host.budget(chosen["vram"], model, where)
    request = request_for(
        anatomy,
        vram=max(1, vram - others),
        ram=host.host_budget(chosen["ram"]),
        device=where,
        **dataclasses.asdict(picture),
    )
    try:
        with host.precision_of_attention(), host.in_the_weights_type(anatomy.unet):
            plan = make_plan(anatomy, request, _planned(model, settings_of(chosen)))
    except BudgetError as error:
        raise _with_others(error, vram, others) from None
    peak = dataclasses.replace(plan.predicted, peak_bytes=plan.predicted.peak_bytes + others)
    return dataclasses.replace(plan, request=dataclasses.replace(request, vram=vram), predicted=peak)


def _with_others(error: BudgetError, vram: int, others: int) -> BudgetError:
    if error.stage == "host" or not others:
        return error
    needed = error.needed_bytes + others
    message = f"{format_size(vram)} cannot hold it: {error.stage} needs at least {format_size(needed)}, "
    message += f"{format_size(others)} of it for the text encoders. Give that much, or a smaller picture"
    return BudgetError(message, needed_bytes=needed, stage=error.stage)


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
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.precision_of_attention())
        attachment = attach(model, _attachable(model, plan.settings), plan.request.device, plan.timing)
        stack.callback(detach, model, attachment)
        attachment.plan = plan
        attachment.add(lowered(model, plan))
        attachment.add(guard(attachment.anatomy, plan.request, functools.partial(_again, model, chosen, picture)))
        _running.append(_Running(model, chosen, picture, attachment, stack.pop_all()))
    return plan, attachment


def _again(
    model: Any, chosen: Mapping[str, Any], picture: Picture, width: int, height: int, batch: int, passes: int
) -> None:
    start(model, chosen, dataclasses.replace(picture, width=width, height=height, batch=batch, passes=passes))


def _attachable(model: Any, settings: Settings) -> Settings:
    """The knobs as they are attached: weights that are on the device, or that the host moves, are left alone."""
    if host.moves_weights(model) or settings.offload == "none":
        settings = dataclasses.replace(settings, offload=None)
    if host.moves_weights(model):
        settings = dataclasses.replace(settings, decoder_device=None)
    return settings


def follow(model: Any, width: int, height: int, batch: int) -> None:
    """Plan anew where the host has loaded another model in the midst of a generation, or comes to a larger picture."""
    if not _running:
        return
    running = _running[-1]
    picture = dataclasses.replace(running.picture, width=width, height=height, batch=batch)
    if running.model is not model or picture.pixels > running.picture.pixels:
        start(model, running.chosen, picture)


def stop() -> None:
    """Take everything off, bit for bit; nothing happens when nothing is attached."""
    while _running:
        _running.pop().undo.close()


def current() -> Attachment | None:
    """What is attached now."""
    return _running[-1].attachment if _running else None
