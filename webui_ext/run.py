"""One generation: plan, attach, and take everything off again, at the latest before the next one.

The host queues its generations, so at most one is under way. It does not tell of those that fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sd_lowvram.errors import BudgetError
from sd_lowvram.memory.threads import at_rest
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.planning.fallback import Shortage, fallback, leaner
from sd_lowvram.planning.plan import FallbackStep, Plan
from sd_lowvram.planning.reasons import remedy
from sd_lowvram.planning.replan import watch_sizes
from sd_lowvram.planning.request import Request, request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.session import Attachment, anatomy_of, attach, detach
from sd_lowvram.settings import Settings, knobs
from sd_lowvram.units import format_least, format_size

from . import host, loading, switching
from .arguments import NAME, chosen_of, settings_of
from .estimate import DECODE_ONLY, FETCHED, decision_in
from .memory_estimate import lowered
from .picture import Generation, side
from .refusal import as_answer


@dataclasses.dataclass(frozen=True)
class _Running:
    model: Any
    chosen: Mapping[str, Any]
    picture: Generation
    attachment: Attachment
    undo: contextlib.ExitStack


_running: list[_Running] = []
_DECODES = {"decode", "encode"}
"""The stages of the autoencoder."""


def plan_for(model: Any, chosen: Mapping[str, Any], picture: Generation) -> Plan:
    """The fastest settings that fit, attaching nothing. Budget and peak count what the host's other modules hold.

    Args:
        model: the host's model, or a blueprint of one.

    Raises:
        BudgetError: nothing fits. BadInputError: knobs that cannot be used.
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
    settings = _planned(model, settings_of(chosen))
    if anatomy.denoiser is None:
        steps_alone = (name for name, knob in knobs().items() if knob.stages and not _DECODES & set(knob.stages))
        settings = dataclasses.replace(settings, **dict.fromkeys(steps_alone))
    anatomy = dataclasses.replace(anatomy, moved=host.moves_weights(model))
    ways = list(loading.ways(model, anatomy)) if anatomy.moved else [{}]
    try:
        plan = _first(ways, anatomy, request, settings)
    except BudgetError as error:
        raise _in_the_users_words(error, chosen, vram, others) from None
    if anatomy.denoiser is None:
        plan = dataclasses.replace(plan, reasons=(*plan.reasons, DECODE_ONLY))
    if host.swaps_layers(model):
        plan = _told_who_decides(model, plan, anatomy)
    predicted = plan.predicted
    peak, reserved = predicted.peak_bytes + others, predicted.reserved_bytes + others
    predicted = dataclasses.replace(predicted, peak_bytes=peak, reserved_bytes=reserved)
    return dataclasses.replace(plan, request=dataclasses.replace(request, vram=vram), predicted=predicted)


def _first(ways: Sequence[Mapping[str, int]], anatomy: Anatomy, request: Request, settings: Settings) -> Plan:
    """The plan for the first of the host's ways to load weights with which there is one."""
    for kept in ways[:-1]:
        with contextlib.suppress(BudgetError):
            return _plan(kept, anatomy, request, settings)
    return _plan(ways[-1], anatomy, request, settings)


def _plan(kept: Mapping[str, int], anatomy: Anatomy, request: Request, settings: Settings) -> Plan:
    with host.precision_of_attention(), host.in_the_type_it_computes_in(anatomy):
        plan = make_plan(dataclasses.replace(anatomy, kept=kept), request, settings, least=False)
    return dataclasses.replace(plan, reasons=(*plan.reasons, FETCHED)) if kept else plan


def _told_who_decides(model: Any, plan: Plan, anatomy: Anatomy) -> Plan:
    """``plan`` with the reason that the host keeps what it has room for, whatever the budget."""
    reasons = tuple(reason for reason in plan.reasons if reason != FETCHED)
    return dataclasses.replace(plan, reasons=(*reasons, loading.decision(model, anatomy, plan)))


def _in_the_users_words(error: BudgetError, chosen: Mapping[str, Any], vram: int, others: int) -> BudgetError:
    """The refusal with the limit that it is about: a budget that other modules share, or one of the knobs."""
    needed = error.needed_bytes
    if error.limit == "ring":
        message = f"weights_mib {chosen['weights_mib']}: {error}"
    elif error.limit == "vram" and others:
        needed += others
        message = f"{format_size(vram)} cannot hold it: {error.stage} needs at least {format_least(needed)}, "
        message += f"{format_size(others)} of it for the text encoders. {remedy(error.by_size)}"
    else:
        return error
    return BudgetError(message, needed_bytes=needed, stage=error.stage, limit=error.limit, by_size=error.by_size)


def _planned(model: Any, settings: Settings) -> Settings:
    """The knobs as the plan gets them: weights that the host moves come as it leaves them."""
    if not host.moves_weights(model):
        return settings
    theirs = dict.fromkeys(host.WEIGHTS)
    return dataclasses.replace(settings, **theirs | {"offload": "component", "decoder_device": "gpu"})


def start(
    model: Any, chosen: Mapping[str, Any], picture: Generation, given_up: tuple[FallbackStep, ...] = ()
) -> tuple[Plan, Attachment]:
    """Plan, attach, and tell of it in the log. A larger picture (a hires fix), or more rows of the denoiser's batch, is
    planned anew before its first step, or refused there; so is another model (a refiner).

    Args:
        given_up: what the generation has given up already, by other plans.

    Raises:
        BudgetError: nothing fits. BadInputError, NoSiteError, ConflictError: see the core's ``optimize``.
    """
    return _put_on(model, chosen, picture, plan_for(model, chosen, picture).after(given_up))


def _put_on(model: Any, chosen: Mapping[str, Any], picture: Generation, plan: Plan) -> tuple[Plan, Attachment]:
    """Attach ``plan`` in place of what is attached, and tell of it."""
    settings = _attachable(model, plan.settings)
    target = host.planned(model)
    coming = Attachment(anatomy_of(target), settings, plan.request.device)
    models = [*coming.modules(), *(one for running in _running for one in running.attachment.modules())]
    with (
        at_rest(models, coming.places),
        contextlib.ExitStack() as stack,
    ):  # a live preview decodes in a thread of its own
        stop()
        stack.enter_context(host.precision_of_attention())
        attachment = attach(target, settings, plan.request.device, plan.timing)
        stack.callback(detach, target, attachment)
        attachment.plan = plan
        attachment.add(lowered(model, plan))
        attachment.add(fallback(attachment.anatomy, functools.partial(_leaner, model, chosen, picture)))
        attachment.add(watch_sizes(attachment.anatomy, plan.request, functools.partial(_again, model, chosen, picture)))
        attachment.add(switching.watched(model, functools.partial(_with_another, chosen, picture)))
        _running.append(_Running(model, chosen, picture, attachment, stack.pop_all()))
    print(f"[{NAME}] {_told(plan, attachment)}")
    return plan, attachment


def _told(plan: Plan, attachment: Attachment) -> str:
    request, predicted = plan.request, plan.predicted
    budget, decides = format_size(request.vram), decision_in(plan)
    peak = format_size(predicted.reserved_bytes + predicted.overhead_bytes)
    size = f"{request.width}x{request.height}, batch {request.batch}"
    memory = f"budget {budget}" if decides else f"peak {peak} of {budget}"
    moved = [decides] if decides else [FETCHED]
    told = [one for one in (*moved, DECODE_ONLY) if one in plan.reasons]
    sites = ", ".join(f"{hook} {count}" for hook, count in attachment.sites.items())
    about = f"about {predicted.seconds:.0f} s"
    return "; ".join(filter(None, (f"{size}: {memory}, {about}", *told, f"sites: {sites or 'none'}")))


def _again(
    model: Any, chosen: Mapping[str, Any], picture: Generation, width: int, height: int, batch: int, passes: int, _: int
) -> None:
    width, height = side(width, encodes=True), side(height, encodes=True)
    with as_answer():
        came = dataclasses.replace(picture, width=width, height=height, batch=batch, passes=passes)
        start(model, chosen, came, fallback_steps())


def _leaner(model: Any, chosen: Mapping[str, Any], picture: Generation, short: Shortage) -> None:
    """Go on with what needs less than the plan by which the run is ``short`` of memory, and tell of it."""

    def make(request: Request, held: Settings) -> Plan:
        return plan_for(model, {**_within(chosen, request), **chosen_of(held)}, picture)

    attachment = _running[-1].attachment
    now: Plan = attachment.plan
    with as_answer():
        found = leaner(now, short, settings_of(chosen), make)
        print(f"[{NAME}] {found.fallback_steps[-1].told}")
        if found.request is now.request:  # as before
            attachment.plan = found
        else:
            _put_on(model, _within(chosen, found.request), picture, found)


def _within(chosen: Mapping[str, Any], request: Request) -> dict[str, Any]:
    return {**chosen, "vram": f"{request.vram} b", "ram": f"{request.ram} b"}


def _with_another(
    chosen: Mapping[str, Any], picture: Generation, load: Callable[[], Any], loaded: Callable[[], Any]
) -> Any:
    """Take everything off while the host loads another model in the midst of a generation, and start with that."""
    given_up = fallback_steps()
    stop()
    result = load()
    start(loaded(), chosen, picture, given_up)
    return result


def _attachable(model: Any, settings: Settings) -> Settings:
    """The knobs as they are attached: weights that are on the device, or that the host moves, are left alone."""
    if host.moves_weights(model) or settings.offload == "none":
        settings = dataclasses.replace(settings, offload=None)
    if host.moves_weights(model):
        settings = dataclasses.replace(settings, decoder_device=None)
    return settings


def follow(model: Any, width: int, height: int, batch: int, passes: int, steps: int | None = None) -> None:
    """Plan anew where the host has loaded another model in the midst of a generation, or comes to a larger picture.

    Args:
        steps: of the pass that comes, where it has a number of its own.
    """
    if not _running:
        return
    running = _running[-1]
    picture = dataclasses.replace(
        running.picture, width=width, height=height, batch=batch, passes=passes, steps=steps or running.picture.steps
    )
    if running.model is not model or picture.load > running.picture.load:
        start(model, running.chosen, picture, fallback_steps())


def stop() -> None:
    """Take everything off, bit for bit; nothing happens when nothing is attached."""
    while _running:
        _running.pop().undo.close()


def fallback_steps() -> tuple[FallbackStep, ...]:
    """What the generation under way has given up since memory ran out."""
    plan = _running[-1].attachment.plan if _running else None
    return plan.fallback_steps if plan is not None else ()


def current() -> Attachment | None:
    """What is attached now."""
    return _running[-1].attachment if _running else None
