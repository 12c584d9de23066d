"""The calls that users make: optimize, plan, max_size, decode and encode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .devices.support import device_of
from .errors import BadInputError, ConflictError, UnsupportedModelError, ran_out
from .hooks.numbers.precision import force_upcast
from .memory.limit import Bound, is_limitable, setter_followed
from .memory.threads import pause_models
from .models.anatomy import Anatomy
from .models.causal_autoencoder import FRAMES
from .models.latents import has_frames, latent_channels, pixel_channels, scale_factor, unpack
from .models.recorded import Rehearsal
from .models.support import cannot_be_called, unsupported_error
from .patches import Patch, roles_of
from .planning.fallback import Shortage, fallback, leaner, shortage
from .planning.first_calls import await_calls, size_of_calls
from .planning.followed_calls import told_of_autograd
from .planning.max_size import largest_plans
from .planning.plan import FallbackStep, Plan
from .planning.replan import exchanges, watch_calls, watch_sizes
from .planning.request import DEFAULT_STEPS, Request, RunOptions, request_for
from .planning.search import make_plan
from .planning.stages import stated_texts, states_all_calls
from .progress import log_event
from .session import Attachment, anatomy_of, attach, attached, attachments, restore
from .settings import Settings, check_settings
from .streaming.host_weights import host_budget
from .tracing.rehearsal import Texts, rehearse_at, rehearse_filled
from .units import parse_size

Size = int | float | str


def plan(
    target: Any,
    *,
    vram: Size | None = None,
    ram: Size | None = None,
    width: int | None = None,
    height: int | None = None,
    batch: int = 1,
    steps: int = DEFAULT_STEPS,
    pictures: int = 1,
    guided: bool = True,
    call: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
    approximate: bool = False,
) -> Plan:
    """Return the fastest settings that fit, with their predicted peak and time; nothing is attached, and nothing runs.

    Args:
        target: as for :func:`optimize`, like all arguments.

    Returns:
        The plan: settings, predicted bytes of each stage, seconds, what more memory would gain, and reasons.

    Raises:
        BudgetError, BadInputError: as :func:`optimize`.
    """
    fixed = check_settings(settings)
    run: RunOptions = {"width": width, "height": height, "batch": batch, "steps": steps, "pictures": pictures}
    request = _request(target, fixed, vram, ram, device, run, guided, call)
    return make_plan(anatomy_of(target, fixed, request.rehearsal), request, fixed, _check_flag(approximate))


def optimize(
    target: Any,
    *,
    vram: Size | None = None,
    ram: Size | None = None,
    width: int | None = None,
    height: int | None = None,
    batch: int = 1,
    steps: int = DEFAULT_STEPS,
    pictures: int = 1,
    guided: bool = True,
    call: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
    approximate: bool = False,
) -> Plan:
    """Make ``target`` run within a budget, in the fastest way that fits; use it afterwards as before.

    Hooks of an earlier call on the same target are taken off first; :func:`restore` takes all of them off. A larger
    picture than planned (a hires fix), or a call with another UNet, autoencoder, text encoder or ControlNet
    (``pipe.unet = other``), is re-planned before its first step, or refused. A call that runs out of memory is
    repeated: unchanged after cached memory is freed, then with smaller strips, parked maps, a smaller ring, and the
    decoder on the CPU, never with approximate settings. Warnings and the plan's ``fallback_steps`` name these steps.

    Args:
        target: a diffusers pipeline of SD1.x, SD2.x, SDXL, SD3, FLUX.1, FLUX.2 Klein, Z-Image, Chroma, Qwen-Image or
            Krea 2, or its denoiser, vae or text encoder. Any other pipeline is planned by its
            own call, which is rehearsed on fake tensors (``call``); if that fails, each model is planned at its first
            call, and the plan has no totals until then. Any other module if ``settings`` fix ``offload``:
            its weights are placed and counted, and its calls are not planned.
        vram: budget on the device: "4GB", "3.5 GiB", 4096 (MiB). None: what is free now.
        ram: budget in host memory, for weights and activations that are not on the device. None: what is free now.
        width: width of the picture in pixels. None: the model's own.
        height: height of the picture in pixels. None: the model's own.
        batch: pictures at a time, without the doubling by guidance.
        steps: denoising steps, for the predicted time.
        pictures: number of pictures in all; compiling the model pays only for many.
        guided: False for a call without guidance, such as Z-Image-Turbo's with ``guidance_scale=0``; its step is
            planned for half the rows or calls.
        call: arguments with which the pipeline will be called, next to size, number and steps: ``{"prompt_embeds":
            embeds}``, ``{"num_frames": 81}``. They are needed for what its signature requires.
        device: device that computes. None: a GPU if there is one, else the CPU.
        settings: knobs that are fixed; the rest is chosen.
        approximate: True to allow settings that change the picture.

    Returns:
        The attached plan. Its ``fidelity`` compares the picture with the picture of the model as it was loaded:
        ``BITWISE`` (identical) or ``ROUNDING`` (identical up to rounding), unless ``approximate`` or ``settings`` allow
        more.

    Raises:
        BudgetError: nothing fits; the message names the smallest budget that works.
        BadInputError: a target, size, number, device or budget that cannot be used.
        NoSiteError, ConflictError: see :func:`attached`.
    """
    fixed = check_settings(settings)
    run: RunOptions = {"width": width, "height": height, "batch": batch, "steps": steps, "pictures": pictures}
    request = _request(target, fixed, vram, ram, device, run, guided, call)
    return attach_plan_for(target, request, fixed, _check_flag(approximate))


def attach_plan_for(
    target: Any,
    request: Request,
    settings: Settings,
    approximate: bool,
    fallback_steps: tuple[FallbackStep, ...] = (),
    least: bool = True,
) -> Plan:
    """Plan ``request`` and attach the plan in place of what is attached to ``target``.

    Args:
        target: as for :func:`optimize`.
        request: picture, budgets and device.
        settings: knobs that are fixed.
        approximate: True to allow settings that change the picture.
        fallback_steps: steps that earlier plans of this run have taken already.
        least: as for :func:`make_plan`.

    Returns:
        The attached plan, as :func:`attach_plan`.

    Raises:
        BudgetError: nothing fits; the earlier attachment stays.
    """
    chosen = make_plan(anatomy_of(target, settings, request.rehearsal), request, settings, approximate, least)
    return attach_plan(target, chosen.after(fallback_steps), settings, approximate)


def attach_plan(target: Any, chosen: Plan, settings: Settings, approximate: bool) -> Plan:
    """Attach ``chosen`` in place of what is attached to ``target``.

    Args:
        target: as for :func:`optimize`.
        chosen: the plan.
        settings, approximate: what ``chosen`` was planned with; later plans of this target are planned with them too.

    Returns:
        The attached plan: ``chosen``, or one with less memory if moving the weights ran out of it.
    """

    budget = chosen.request.vram

    def replan(**size: Any) -> None:
        now = _plan_of(target)
        request = dataclasses.replace(now.request, **size)
        attach_plan_for(target, request, settings, approximate, now.fallback_steps, least=False)

    def larger(width: int, height: int, batch: int, passes: int, frames: int) -> None:
        replan(width=width, height=height, batch=batch, passes=passes, frames=frames)

    def called(record: Rehearsal) -> None:
        replan(rehearsal=record, **size_of_calls(record, _plan_of(target).request.batch))
        _log_first_plan(_plan_of(target))

    def exchanged(name: str, part: nn.Module) -> None:
        if roles_of(part):
            raise ConflictError(
                f"{name} of this {type(target).__name__} is now a {type(part).__name__} that carries a plan of its "
                "own: restore() what it was optimized with first"
            )
        replan(rehearsal=_again(target, name, part))

    def go_leaner(short: Shortage) -> Plan:
        now = _plan_of(target)
        plan = _leaner(anatomy_of(target, now.settings, now.request.rehearsal), now, short, settings)
        if plan.request is now.request:  # as before
            attachments(target)[-1].plan = plan
            return plan
        return put_on(plan)

    def watches(anatomy: Anatomy, request: Request) -> Iterator[Patch]:
        """Guards of every call, innermost first."""
        yield from fallback(anatomy, go_leaner)
        yield from watch_sizes(anatomy, request, larger)
        yield from watch_calls(anatomy, request, called)
        yield from exchanges(target, anatomy, exchanged)
        yield from told_of_autograd(anatomy)

    def put_on(chosen: Plan) -> Plan:
        """Attach ``chosen``, or where the move of the weights runs out of memory what is leaner."""
        while True:
            try:
                _put_on(target, chosen, watches, budget)
                return chosen
            except (RuntimeError, MemoryError) as error:
                short = shortage(error, "the move of the weights")
            chosen = _leaner(anatomy_of(target, chosen.settings, chosen.request.rehearsal), chosen, short, settings)

    return put_on(chosen)


def _again(target: Any, name: str, part: nn.Module) -> Rehearsal | None:
    """The calls that a planned pipeline makes with ``part`` as its new ``name``, if its call was rehearsed.

    Raises:
        UnsupportedModelError: the pipeline cannot be called with it.
    """
    record = _plan_of(target).request.rehearsal
    if record is None or not record.asked:
        return record
    try:
        return rehearse_filled(target, *record.asked)
    except Exception as error:
        if ran_out(error):
            raise
        raise unsupported_error(target, name, part) from error


def _put_on(target: Any, chosen: Plan, watches: Callable[[Anatomy, Request], Iterator[Patch]], budget: int) -> None:
    """Attach ``chosen`` in place of what is attached to ``target``, and outside it what ``watches`` over its calls,
    which ``budget`` limits.
    """
    parked = max(stage.parked_bytes for stage in chosen.stages)
    device = chosen.request.device
    rehearsal = chosen.request.rehearsal
    coming = Attachment(anatomy_of(target, chosen.settings, rehearsal), chosen.settings, device)
    with pause_models(coming.modules(), coming.places), host_budget(chosen.request.ram, parked), setter_followed():
        restore(target)
        attachment = attach(target, chosen.settings, device, chosen.timing, rehearsal)
        attachment.plan = chosen
        _limit(attachment, chosen, budget)
        attachment.add(watches(attachment.anatomy, chosen.request))


def _limit(attachment: Attachment, plan: Plan, budget: int) -> None:
    """Limit torch's allocator to ``budget`` while the attachment's models run."""
    if not is_limitable(attachment.device):
        return
    stages = {stage.component: stage.name for stage in plan.stages}
    overhead = plan.predicted.overhead_bytes
    bound = Bound(attachment.device, budget, overhead, stages, attachment.modules())
    attachment.add_undoing(bound.close)
    attachment.bound = bound


def _plan_of(target: Any) -> Plan:
    """The current plan of ``target``."""
    plan: Plan = attachments(target)[-1].plan
    return plan


def _log_first_plan(plan: Plan) -> None:
    """Log a plan that was made from first calls, once it has totals."""
    record = plan.request.rehearsal
    if record is not None and record.why and not plan.at_first_call:
        log_event(__name__, f"planned at first calls: {plan!r}")


def _leaner(anatomy: Anatomy, plan: Plan, short: Shortage, settings: Settings) -> Plan:
    """Return the next plan like :func:`leaner`, and log it."""
    lean = leaner(plan, short, settings, functools.partial(make_plan, anatomy, least=False))
    log_event(__name__, lean.fallback_steps[-1].told)
    return lean


def max_size(
    target: Any,
    *,
    vram: Size | None = None,
    ram: Size | None = None,
    batch: int = 1,
    call: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
    approximate: bool = False,
) -> dict[str, Plan | None]:
    """Return the largest pictures that fit; takes up to a minute the first time.

    Args:
        target: as for :func:`optimize`, like all arguments.

    Returns:
        The plans of the largest "square" and "16:9" pictures, whose ``request`` has their size in pixels; None if no
        size fits.

    Raises:
        BadInputError: as :func:`optimize`, or the pipeline's call cannot be rehearsed.
    """
    request = _request(target, None, vram, ram, device, {"batch": batch}, call=call)
    record = request.rehearsal

    def anatomy_at(width: int, height: int) -> Anatomy:
        sized = None if record is None else rehearse_at(target, record, width, height)
        return anatomy_of(target, rehearsal=sized)

    fixed, anatomy = check_settings(settings), anatomy_of(target, rehearsal=record)
    return largest_plans(anatomy, request, fixed, _check_flag(approximate), anatomy_at if record else None)


def decode(
    vae: nn.Module,
    latents: Tensor,
    *,
    vram: Size | None = None,
    ram: Size | None = None,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
) -> Tensor:
    """Decode unscaled latents (N, 4, h, w), as ``vae.decode`` takes them, to pixels (N, 3, H, W) in about [-1, 1].

    If the plain decode does not fit, it runs by strips with the statistics of the whole picture. Fidelity:
    ``rounding``. Autoencoders of Qwen-Image and Wan take frames (N, C, frames, h, w) and return 1 + 4 (frames - 1)
    frames of pixels; a picture is one frame. The autoencoder of FLUX.2 also takes its denoiser's packed latents (N,
    128, h / 2, w / 2).

    Args:
        vae: an autoencoder, or a pipeline that has one. An fp16 autoencoder whose configuration forbids fp16 computes
            in fp32.
        latents: in any floating type.
        vram: budget on the device, as for :func:`optimize`.
        ram: budget in host memory, as for :func:`optimize`.
        device: device that computes. None: the device of ``latents``.
        settings: knobs that are fixed; the rest is chosen.

    Returns:
        The pixels on ``device``, in the type in which the autoencoder computes.

    Raises:
        BudgetError: nothing fits.
        BadInputError: ``vae`` is not an autoencoder, or the latents have another shape.
    """
    anatomy = _autoencoder(vae)
    latents = unpack(anatomy, latents)
    shape = _checked_shape("latents", latents, latent_channels(anatomy), has_frames(anatomy))
    factor = scale_factor(anatomy)
    size: RunOptions = {"width": shape[-1] * factor, "height": shape[-2] * factor, "batch": shape[0]}
    if len(shape) == 5:
        size["frames"] = shape[2]
    return _run(anatomy, anatomy.family.decode, latents, vram, ram, device, settings, size)


def encode(
    vae: nn.Module,
    pixels: Tensor,
    *,
    vram: Size | None = None,
    ram: Size | None = None,
    device: torch.device | str | None = None,
    settings: Settings | None = None,
) -> Tensor:
    """Encode pixels (N, 3, H, W) in [-1, 1] to the moments of unscaled latents.

    Fidelity is that of :func:`decode`. Autoencoders of Qwen-Image and Wan take frames (N, 3, frames, H, W); after the
    first, every four frames become one.

    Args:
        vae: as for :func:`decode`, and so are ``vram``, ``ram``, ``device`` and ``settings``.
        pixels: in any floating type; height and width are multiples of 8.

    Returns:
        The moments (N, 8, h, w): the mean in the first half of the channels, the log-variance in the second.

    Raises:
        BudgetError: nothing fits.
        BadInputError: ``vae`` is not an autoencoder, or a side is not a multiple of 8.
    """
    anatomy = _autoencoder(vae)
    shape = _checked_shape("pixels", pixels, pixel_channels(anatomy), has_frames(anatomy))
    size: RunOptions = {"width": shape[-1], "height": shape[-2], "batch": shape[0]}
    if len(shape) == 5:
        size["frames"] = 1 + (shape[2] - 1) // FRAMES
    return _run(anatomy, anatomy.family.encode, pixels, vram, ram, device, settings, size)


def _checked_shape(what: str, tensor: Tensor, channels: int, frames: bool) -> tuple[int, ...]:
    """The shape of a map, if an autoencoder can take it."""
    takes = f"(N, {channels}, {'frames, ' if frames else ''}height, width)"
    if not isinstance(tensor, Tensor):
        raise BadInputError(f"{what} must be a tensor {takes}, not a {type(tensor).__name__}")
    shape = tuple(tensor.shape)
    if len(shape) != 4 + frames or shape[1] != channels or 0 in shape or not tensor.is_floating_point():
        raise BadInputError(
            f"{what} of shape {shape} and type {tensor.dtype} are not what this autoencoder takes: "
            f"{takes}, none of them 0, of a floating type"
        )
    return shape


def _autoencoder(target: Any) -> Anatomy:
    """The anatomy of the autoencoder that ``target`` is, or that it holds."""
    vae = anatomy_of(target).vae
    if vae is None:
        raise BadInputError(f"{type(target).__name__} is not an autoencoder")
    return anatomy_of(vae)


def _run(
    anatomy: Anatomy,
    call: Callable[[Any, Tensor], Tensor],
    tensor: Tensor,
    vram: Size | None,
    ram: Size | None,
    device: torch.device | str | None,
    settings: Settings | None,
    size: RunOptions,
) -> Tensor:
    """``call`` of the autoencoder of ``anatomy`` with ``tensor``, a picture of ``size``, within a budget."""
    vae, fixed = anatomy.vae, check_settings(settings)
    assert vae is not None
    half = any(tensor.dtype == torch.float16 for tensor in vae.parameters())
    if half and force_upcast(anatomy, anatomy.autoencoder or ""):
        fixed = fixed.filled(precision="fp32")
    where = tensor.device if device is None else device
    request = _request(vae, None, vram, ram, where, size)
    chosen = make_plan(anatomy, request, fixed, least=False)
    while True:
        try:
            with attached(vae, chosen.settings, device=where) as attachment, torch.no_grad():
                _limit(attachment, chosen, request.vram)
                return call(vae, tensor)
        except (RuntimeError, MemoryError) as error:
            short = shortage(error, "the autoencoder")
        chosen = _leaner(anatomy, chosen, short, fixed)


def _request(
    target: Any,
    settings: Settings | None,
    vram: Size | None,
    ram: Size | None,
    device: torch.device | str | None,
    run: RunOptions,
    guided: bool = True,
    call: Mapping[str, Any] | None = None,
) -> Request:
    """The request of a call of ours; what is not stated is as the target itself runs."""
    anatomy = anatomy_for_call(target, settings, run, _check_flag(guided, "guided"), call)
    asked: RunOptions = {
        **run,
        "vram": None if vram is None else parse_size(vram, "vram"),
        "ram": None if ram is None else parse_size(ram, "ram"),
        "device": device_of(device),
    }
    request = request_for(anatomy, **asked)
    return request if guided else dataclasses.replace(request, passes=1, calls=1)


def anatomy_for_call(
    target: Any, settings: Settings | None, run: RunOptions, guided: bool, call: Mapping[str, Any] | None
) -> Anatomy:
    """Return the anatomy of ``target``; of a pipeline, with the calls that it makes of its models.

    Args:
        target: as for :func:`optimize`, and so are ``settings``, ``guided`` and ``call``.
        run: size, number of pictures and steps.

    Raises:
        BadInputError: the stated call cannot be rehearsed.
        UnsupportedModelError: no family is known, and the target is not a pipeline.
    """
    refusal, scale, states = None, ("guidance_scale", 1.0), False
    texts: Texts = (None, None)
    try:
        anatomy = anatomy_of(target, settings)
        if call is None and anatomy.family.step_inputs is not None and anatomy.family.arguments is None:
            return anatomy  # a host's, or somebody else's
        scale = anatomy.family.guidance_scale, float(anatomy.family.guides_above)
        states, texts = not anatomy.family.known or states_all_calls(anatomy), stated_texts(anatomy)
    except UnsupportedModelError as error:
        refusal = error
    record = _rehearsal(target, run, None if guided else scale, call, texts, not states)
    if record is not None:
        return anatomy_of(target, settings, record)
    if refusal is not None:
        raise refusal
    return anatomy


def _rehearsal(
    target: Any, run: RunOptions, scale: Any, call: Mapping[str, Any] | None, texts: Texts, required: bool
) -> Rehearsal | None:
    """The record of the target's own call, or one that waits for its first calls; None if it has none.

    Args:
        texts: as for :func:`rehearse_filled`.
        required: True if there is no plan without a record.
    """
    if isinstance(target, nn.Module) or not isinstance(getattr(target, "components", None), dict):
        if call is None:
            return None
        raise BadInputError(f"a stated call is for pipelines, and {type(target).__name__} is not one: leave it out")
    size = run.get("width"), run.get("height"), run.get("batch", 1), run.get("steps", DEFAULT_STEPS)
    try:
        record = rehearse_filled(target, call or {}, *size, scale, texts)
    except Exception as error:
        if ran_out(error):
            raise
        if call is not None and isinstance(error, (TypeError, ValueError)):
            raise cannot_be_called(target, call, error) from error
        return await_calls(target, error) if required or call is not None else None
    return record if record.rows else None


def _check_flag(value: bool, name: str = "approximate") -> bool:
    if not isinstance(value, bool):
        raise BadInputError(f"{name} {value!r} must be True or False")
    return value
