"""A generation: plan, attach, and take everything off when the host's run ends, for whatever reason.

The host queues its generations, so at most one is in progress; its ``p`` is the owner. Other extensions draw within it
(a face again, for example): they call the host's callbacks for a copy of the owner's ``p``, and make pictures of their
own. Those run with the owner's hooks and budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from modules import processing, shared

from sd_lowvram.compat.private import FakeTensor
from sd_lowvram.errors import BadInputError, BudgetError, PlanningError
from sd_lowvram.memory.threads import pause_models
from sd_lowvram.models.anatomy import Anatomy
from sd_lowvram.models.calls import map_in_call
from sd_lowvram.models.latents import scale_factor
from sd_lowvram.patches import Patch, set_patch, wrap
from sd_lowvram.planning.fallback import Shortage, fallback, leaner
from sd_lowvram.planning.plan import FallbackStep, Plan
from sd_lowvram.planning.reasons import remedy
from sd_lowvram.planning.replan import watch_sizes
from sd_lowvram.planning.request import Request, request_for
from sd_lowvram.planning.search import make_plan
from sd_lowvram.planning.wording import Kind, select_kinds
from sd_lowvram.session import Attachment, anatomy_of, attach, detach
from sd_lowvram.settings import Settings, knobs
from sd_lowvram.units import format_least, format_size

from . import host, hosted, infotext, loading, saving, switching
from .arguments import NAME, TITLE, knob_values, settings_of
from .estimate import (
    BESIDE,
    DECODE_ONLY,
    DECODES_BESIDE,
    FETCHED,
    STEPS_PLAIN,
    decision_in,
    plain_reasons,
    tile_reasons,
)
from .memory_estimate import limit_weights, load_anew, lower_estimates, unload_excess
from .picture import Generation, requested_picture, side
from .refusal import Refused, refuse_errors


@dataclasses.dataclass(frozen=True)
class _Running:
    model: Any
    chosen: Mapping[str, Any]
    picture: Generation
    attachment: Attachment
    undo: contextlib.ExitStack
    serves: Any
    """The host's ``p`` for which it was planned."""


@dataclasses.dataclass(frozen=True)
class _Owner:
    """The generation whose panel is on.

    Attributes:
        under_way: the ``p`` of the host's runs, outermost first: the owner's own, then those within it.
    """

    p: Any
    chosen: Mapping[str, Any]
    unwatch: Callable[[], None]
    under_way: list[Any] = dataclasses.field(default_factory=list)


_running: list[_Running] = []
_owners: list[_Owner] = []
_DECODES = {"decode", "encode"}
"""The stages of the autoencoder."""


def plan_for(model: Any, chosen: Mapping[str, Any], picture: Generation) -> Plan:
    """The fastest settings that fit, attaching nothing. Budget and peak count what the host's other modules hold.

    Args:
        model: the host's model, or a blueprint of one.
        chosen: the panel's arguments by name; with "tiled", which is true where another extension would decode in tiles
            of its own: the decode is exact then, unless the panel has chosen another. With "joined", which is true
            where another extension computes attention, prompt and negative prompt stay in one call.

    Raises:
        BudgetError: nothing fits. BadInputError: knobs that cannot be used.
    """
    where = host.device()
    anatomy = host.anatomy(model)
    vram, other_bytes = host.budget(chosen["vram"], model, where)
    request = request_for(
        anatomy,
        vram=max(1, vram - other_bytes),
        ram=host.host_budget(chosen["ram"]),
        device=where,
        fills=where.type != "cpu" and bool(chosen["vram"]),
        **dataclasses.asdict(picture),
    )
    settings = _plan_settings(model, anatomy, chosen)
    anatomy = dataclasses.replace(anatomy, moved=host.moves_weights(model))
    try:
        plan = dataclasses.replace(_first(_tries(model, anatomy, request, settings)), request=request)
    except BudgetError as error:
        raise _explain_refusal(error, chosen, vram, other_bytes) from None
    except PlanningError as error:
        if not hosted.leave_out(model):
            raise
        print(f"[{NAME}] the steps are not predicted: {error}")
        return plan_for(model, chosen, picture)
    plan = _add_reasons(model, plan, anatomy, chosen)
    predicted = plan.predicted
    figures = ("peak_bytes", "reserved_bytes", "kept_bytes")
    predicted = dataclasses.replace(predicted, **{name: getattr(predicted, name) + other_bytes for name in figures})
    return dataclasses.replace(plan, request=dataclasses.replace(request, vram=vram), predicted=predicted)


_Try = tuple[Anatomy, Request, Settings]


def _tries(model: Any, anatomy: Anatomy, request: Request, settings: Settings) -> list[_Try]:
    """Requests to plan until one of them fits: one for each of the host's ways to load weights, the fastest first.

    Before them, where the host keeps all weights loaded, a plan that counts them all: it may decode in less.
    """
    ways = loading.ways(model, anatomy) if anatomy.moved else [{}]
    tries: list[_Try] = [(dataclasses.replace(anatomy, kept=resident), request, settings) for resident in ways]
    if loading.keeps_all(model) and (rest := request.vram - loading.bytes_beside(model, anatomy)) > 0:
        whole = dataclasses.replace(anatomy, moved=False), dataclasses.replace(request, vram=rest)
        tries.insert(0, (*whole, dataclasses.replace(settings, offload="none")))
    return tries


def _first(tries: Sequence[_Try]) -> Plan:
    """The plan of the first of ``tries`` that has one."""
    for one in tries[:-1]:
        with contextlib.suppress(BudgetError):
            return _plan(*one)
    return _plan(*tries[-1])


def _plan(anatomy: Anatomy, request: Request, settings: Settings) -> Plan:
    with host.precision_of_attention(), host.use_compute_type(anatomy):
        plan = make_plan(anatomy, request, settings, least=False)
    return dataclasses.replace(plan, reasons=(*plan.reasons, FETCHED)) if anatomy.kept else plan


def _add_reasons(model: Any, plan: Plan, anatomy: Anatomy, chosen: Mapping[str, Any]) -> Plan:
    """``plan`` with the reasons that are the host's: steps that run plain, another Tiled VAE, weights that it keeps."""
    reasons = list(plan.reasons)
    if not _has_hooks(anatomy):
        reasons.append(DECODE_ONLY if anatomy.denoiser is None else STEPS_PLAIN)
    if chosen.get("tiled"):
        reasons.append(BESIDE if plan.settings.vae_tiles == "exact" else DECODES_BESIDE)
    if host.swaps_layers(model):
        reasons = [reason for reason in reasons if reason.kind is not Kind.HOST_FETCHES]
        reasons.append(loading.decision(model, anatomy, plan))
    return dataclasses.replace(plan, reasons=tuple(reasons))


def _has_hooks(anatomy: Anatomy) -> bool:
    """True if hooks act in the steps."""
    return anatomy.denoiser is not None and not hosted.is_plain(anatomy)


def _explain_refusal(error: BudgetError, chosen: Mapping[str, Any], vram: int, other_bytes: int) -> BudgetError:
    """The refusal with the limit that it is about: a budget that other modules share, or one of the knobs."""
    needed = error.needed_bytes
    if error.limit == "ring":
        message = f"weights_mib {chosen['weights_mib']}: {error}"
    elif error.limit == "vram" and other_bytes:
        needed += other_bytes
        message = f"{format_size(vram)} cannot hold it: {error.stage} needs at least {format_least(needed)}, "
        message += f"{format_size(other_bytes)} of it for the text encoders. {remedy(error.by_size)}"
    else:
        return error
    return BudgetError(message, needed_bytes=needed, stage=error.stage, limit=error.limit, by_size=error.by_size)


def _plan_settings(model: Any, anatomy: Anatomy, chosen: Mapping[str, Any]) -> Settings:
    """The knobs as the plan gets them: weights that the host moves come as it leaves them, steps that it runs plain
    have none."""
    settings = settings_of(chosen)
    if host.moves_weights(model):
        theirs = dict.fromkeys(host.WEIGHTS)
        settings = dataclasses.replace(settings, **theirs | {"offload": "component", "decoder_device": "gpu"})
    if chosen.get("tiled"):
        settings = settings.filled(vae_tiles="exact")
    if chosen.get("joined"):
        settings = dataclasses.replace(settings, guidance_in_turn=False)
    if not _has_hooks(anatomy):
        steps_alone = (name for name, knob in knobs().items() if knob.stages and not _DECODES & set(knob.stages))
        settings = dataclasses.replace(settings, **dict.fromkeys(steps_alone))
    return settings


def own(p: Any, chosen: Mapping[str, Any]) -> None:
    """Make the generation ``p``, whose panel has ``chosen``, the owner until the host's run ends."""
    end()
    watched = hasattr(processing, "process_images_inner")
    watch = wrap(processing, "process_images_inner", _run, "owner")
    _owners.append(_Owner(p, chosen, set_patch(watch) if watched else lambda: None))


def _run(original: Callable[..., Any], p: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the host's run of ``p``: the owner's, or one within it. What an owner's leaves goes when it ends."""
    owner = _owners[-1] if _owners else None
    if owner is not None and not owner.under_way and owner.p is not p:  # the owner's failed before it began
        end()
        owner = None
    if owner is None:
        return original(p, *args, **kwargs)
    owner.under_way.append(p)
    try:
        if owner.p is not p:
            _follow_model(owner, p)
        result = original(p, *args, **kwargs)
        if owner.p is p:
            saving.end(p)
        return result
    finally:
        owner.under_way.pop()
        if not owner.under_way:
            end()


def _follow_model(owner: _Owner, p: Any) -> None:
    """Plan for the model of ``p``, a run within the owner's, where it is another than the one that carries hooks."""
    model = shared.sd_model
    if not _running or _running[-1].model is not model:
        picture = requested_picture(p, model)
        with _answers(picture):
            start(model, owner.chosen, picture)


def is_within(p: Any) -> bool:
    """Return True if ``p`` belongs to the owner's run, which is in progress and has hooks.

    Such a ``p`` is a copy of the owner's, or a picture that another extension makes in the run."""
    return any(owner.under_way and (owner.p is not p or _running) for owner in _owners)


def serves(p: Any) -> bool:
    """True if ``p`` is the owner."""
    return any(owner.p is p for owner in _owners)


def chosen_by_owner() -> Mapping[str, Any]:
    """The arguments of the generation that is served."""
    return _owners[-1].chosen


def finish_pictures(p: Any) -> None:
    """The host has the pictures of ``p``; the end of its run comes next, where the host's run is watched."""
    if any(owner.p is p and not owner.under_way for owner in _owners):
        saving.end(p)
        end()


def end() -> None:
    """Take everything off, and own nothing."""
    stop()
    while _owners:
        _owners.pop().unwatch()


def _now() -> Any:
    """The host's ``p`` that runs now; None where that is not known."""
    return next((owner.under_way[-1] for owner in _owners if owner.under_way), None)


@contextlib.contextmanager
def _answers(what: Generation | str) -> Iterator[None]:
    """Turn a refusal of ``what`` in the block, which the host calls, into the host's kind of answer.

    Another extension may catch that answer, so the owner's pictures report the refusal too."""
    try:
        with refuse_errors():
            yield
    except Refused as refused:
        shown = what if isinstance(what, str) else f"{what.width}x{what.height}"
        for owner in _owners:
            print(f"[{NAME}] {shown} in this generation was refused: {refused}")
            owner.p.comment(f"{NAME}: {shown} in this generation was refused: {refused}")
            owner.p.extra_generation_params[infotext.REFUSED] = shown
        raise


def start(
    model: Any, chosen: Mapping[str, Any], picture: Generation, given_up: tuple[FallbackStep, ...] = ()
) -> tuple[Plan, Attachment]:
    """Plan, attach, and report it in the log. A larger picture (a hires fix), or more rows of the denoiser's batch, is
    planned anew before its first step, or refused there; so is another model (a refiner).

    Args:
        given_up: what the generation has given up already, by other plans.

    Raises:
        BudgetError: nothing fits. BadInputError, NoSiteError, ConflictError: see the core's ``optimize``.
    """
    return _put_on(model, chosen, picture, plan_for(model, chosen, picture).after(given_up))


def _put_on(model: Any, chosen: Mapping[str, Any], picture: Generation, plan: Plan) -> tuple[Plan, Attachment]:
    """Attach ``plan`` in place of what is attached, and report it in the log."""
    settings = _attachable(model, plan.settings)
    target = host.plannable_anatomy(model)
    limited = not _running and unload_excess(model, plan)  # within a run, the host has loaded what runs
    coming = Attachment(anatomy_of(target), settings, plan.request.device)
    models = [*coming.modules(), *(module for running in _running for module in running.attachment.modules())]
    with (
        pause_models(models, coming.places),
        contextlib.ExitStack() as stack,
    ):  # a live preview decodes in a thread of its own
        stop()
        theirs = host.attention_elsewhere(model)
        stack.enter_context(host.precision_of_attention())
        attachment = attach(target, settings, plan.request.device, plan.timing)
        stack.callback(detach, target, attachment)
        for module, forward in theirs:  # above ours
            module.forward = forward
        attachment.plan = plan
        attachment.add(lower_estimates(model, plan))
        attachment.add(limit_weights(model, plan))
        if limited:
            stack.callback(load_anew)
        attachment.add(fallback(attachment.anatomy, functools.partial(_leaner, model, chosen, picture)))
        again = functools.partial(_replan, model, chosen, picture)
        attachment.add(watch_sizes(attachment.anatomy, plan.request, again))
        if not picture.encodes:
            attachment.add(_watch_encodes(attachment.anatomy, again))
        attachment.add(_refuse_hypernetworks(attachment.anatomy))
        attachment.add(switching.watch_loading(model, functools.partial(_switch_model, chosen, picture)))
        _running.append(_Running(model, chosen, picture, attachment, stack.pop_all(), _now()))
    print(f"[{NAME}] {_run_line(plan, attachment)}")
    for owner in _owners:
        for reason in tile_reasons(plan):
            owner.p.comment(f"{NAME}: {reason}")
    return plan, attachment


def _run_line(plan: Plan, attachment: Attachment) -> str:
    request, predicted = plan.request, plan.predicted
    budget, decides = format_size(request.vram), decision_in(plan)
    needed = format_size(predicted.reserved_bytes + predicted.overhead_bytes)
    size = f"{request.width}x{request.height}, batch {request.batch}"
    memory = f"budget {budget}" if decides else f"needs {needed} of {budget}"
    moved = [decides] if decides else select_kinds(plan.reasons, Kind.HOST_FETCHES)
    notes = [*moved, *plain_reasons(plan), *tile_reasons(plan)]
    sites = ", ".join(f"{hook} {count}" for hook, count in attachment.sites.items())
    about = f"about {predicted.seconds:.0f} s"
    return "; ".join(filter(None, (f"{size}: {memory}, {about}", *notes, f"sites: {sites or 'none'}")))


def _replan(
    model: Any,
    chosen: Mapping[str, Any],
    picture: Generation,
    width: int,
    height: int,
    batch: int,
    passes: int | None,
    frames: int = 1,
    encodes: bool = False,
) -> None:
    width, height = side(width, encodes=True), side(height, encodes=True)
    base = _asked_now(model) or picture
    came = dataclasses.replace(
        base,
        width=width,
        height=height,
        batch=batch,
        passes=passes or base.passes,
        encodes=encodes or base.encodes,
        frames=frames,
    )
    with _answers(came):
        start(model, chosen, came, fallback_steps())


def _asked_now(model: Any) -> Generation | None:
    """The innermost generation of the host that is in progress; None if unknown."""
    return None if (p := _now()) is None else requested_picture(p, model)


def _watch_encodes(anatomy: Anatomy, again: Callable[..., None]) -> Iterator[Patch]:
    """Plan anew where a picture is encoded in a run that was to start from none, by another extension."""
    autoencoder: Any = anatomy.vae

    def encode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        map_ = map_in_call(autoencoder, args, kwargs)
        if map_ is None or isinstance(map_.latents, FakeTensor):
            return original(*args, **kwargs)
        height, width = map_.size()
        again(width, height, map_.rows, None, encodes=True)
        return autoencoder.encode(*args, **kwargs)

    if autoencoder is not None and "encode" in anatomy.entries[anatomy.autoencoder or ""]:
        yield wrap(autoencoder, "encode", encode, "encodes")


def _refuse_hypernetworks(anatomy: Anatomy) -> Iterator[Patch]:
    """Refuse, before the first step, what our attention would leave out."""

    def look(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(shared, "loaded_hypernetworks", None):
            with _answers("a hypernetwork"):
                raise BadInputError(
                    "a hypernetwork changes what attention sees, and sd-lowvram's attention would leave it out: take "
                    f"it out of the prompt, or turn {TITLE} off"
                )
        return original(*args, **kwargs)

    name = anatomy.denoiser or ""
    yield from (wrap(anatomy.components[name], entry, look, "hypernetworks") for entry in anatomy.entries.get(name, ()))


def _leaner(model: Any, chosen: Mapping[str, Any], picture: Generation, short: Shortage) -> None:
    """Attach a plan with less memory than the one with which the run is ``short`` of it, and report it in the log."""

    def make(request: Request, held: Settings) -> Plan:
        return plan_for(model, {**_with_budgets(chosen, request), **knob_values(held)}, picture)

    attachment = _running[-1].attachment
    now: Plan = attachment.plan
    with _answers(picture):
        lean_plan = leaner(now, short, settings_of(chosen), make)
        print(f"[{NAME}] {lean_plan.fallback_steps[-1].told}")
        if lean_plan.request is now.request:  # as before
            attachment.plan = lean_plan
        else:
            _put_on(model, _with_budgets(chosen, lean_plan.request), picture, lean_plan)


def _with_budgets(chosen: Mapping[str, Any], request: Request) -> dict[str, Any]:
    return {**chosen, "vram": f"{request.vram} b", "ram": f"{request.ram} b"}


def _switch_model(
    chosen: Mapping[str, Any], picture: Generation, load: Callable[[], Any], loaded: Callable[[], Any]
) -> Any:
    """Take everything off while the host loads another model in the midst of a generation, and start with that."""
    given_up = fallback_steps()
    stop()
    result = load()
    model = loaded()
    with _answers("another model"):
        start(model, chosen, _asked_now(model) or picture, given_up)
    return result


def _attachable(model: Any, settings: Settings) -> Settings:
    """The knobs as they are attached: weights that are on the device, or that the host moves, are left alone."""
    if host.moves_weights(model) or settings.offload == "none":
        settings = dataclasses.replace(settings, offload=None)
    if host.moves_weights(model):
        settings = dataclasses.replace(settings, decoder_device=None)
    return settings


def follow(p: Any, model: Any, shape: Sequence[int], passes: int, steps: int | None = None, anew: bool = False) -> None:
    """Re-plan if the plan in use is not for what comes next.

    So it is if the host has loaded another model during a generation, draws a larger picture, or returns to the owner's
    ``p`` from another one, and if another extension has put a Tiled VAE or its own attention over our hooks.

    Args:
        shape: of the latents, (N, C, h, w) or (N, C, frames, h, w).
        steps: of the pass that comes, where it has a number of its own.
        anew: True to plan again whatever comes.
    """
    if not _is_under_way():
        return
    running = _running[-1] if _running else None
    requested = _asked_now(model) or (running.picture if running else None)
    if requested is None:
        return
    factor = 8 if running is None else scale_factor(running.attachment.anatomy)
    picture = requested.of_latents(shape, factor, passes, steps)
    chosen = _owners[-1].chosen if running is None else running.chosen
    others = {"tiled": host.is_tiled_elsewhere, "joined": host.attention_elsewhere}
    came = {name: True for name, has in others.items() if not chosen.get(name) and has(model)}
    if came or anew or running is None or _is_outgrown(running, p, model, picture, steps):
        with _answers(picture):
            start(model, {**chosen, **came}, picture, fallback_steps())


def _is_under_way() -> bool:
    """True if something is attached, or the host draws for one of our owners."""
    return bool(_running) or any(owner.under_way for owner in _owners)


def _is_outgrown(running: _Running, p: Any, model: Any, picture: Generation, steps: int | None) -> bool:
    """True if what is attached was planned for another model, a smaller picture, other steps, or another ``p``."""
    if running.model is not model or picture.load > running.picture.load:
        return True
    if steps not in (None, running.picture.steps):  # the picture was encoded at the size that comes
        return True
    return bool(serves(p)) and running.serves is not _now()


def stop() -> None:
    """Take everything off, bit for bit; nothing happens when nothing is attached."""
    while _running:
        _running.pop().undo.close()


def fallback_steps() -> tuple[FallbackStep, ...]:
    """Fallback steps of the generation in progress."""
    plan = _running[-1].attachment.plan if _running else None
    return plan.fallback_steps if plan is not None else ()


def current() -> Attachment | None:
    """The current attachment."""
    return _running[-1].attachment if _running else None
