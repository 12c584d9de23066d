"""Hooks on a MODEL, through the wrappers of its ModelPatcher: on before each call of the UNet, off after it.

Clones of a model share one UNet, so nothing may stay on it between calls. Around a whole sampling the plan takes the
place of the host's estimate of activations: the host keeps more of the model on the device, and puts no more prompts
into a call than fit. While it loads the weights it also gets the bytes that are outside the budget.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..sd_lowvram.errors import BadInputError, BudgetError, PlanningError
from ..sd_lowvram.memory.pinned_buffers import PINNED_BUFFERS
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.models.compvis import TOKEN_PATCHES
from ..sd_lowvram.models.latents import native_size, scale_factor
from ..sd_lowvram.planning.fallback import Shortage, leaner, shortage
from ..sd_lowvram.planning.memory_profile import measured
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.session import Attachment, enter_hooks, prepare
from ..sd_lowvram.settings import Settings
from ..sd_lowvram.units import format_least, format_size
from . import host
from .attending import DOOR, is_needed, override
from .autoencoder import foresee_decode
from .interfaces import HostVAE, ModelPatcher
from .node_request import NodeRequest, PlanRecord, attachable, plan_for_host
from .report_text import fits, needed_bytes, room_for_weights, run_line, verdict, warn_above
from .step_clock import StepClock

MORE_THAN_IS_FREE = float(1 << 62)
"""Bytes that no device has: of calls for which they are needed the host makes smaller ones."""
_ATTENTION = ("attention", "attention_mib", "deterministic")


class Denoiser:
    """The wrappers of one clone, with the plans that it has made and the hooks that are ready for them."""

    def __init__(
        self, anatomy: Anatomy, node_request: NodeRequest, device: Any, record: PlanRecord, vae: HostVAE | None
    ) -> None:
        self._anatomy = anatomy
        self._scale = scale_factor(anatomy)
        self._node_request = node_request
        self._device = device
        self._vae = vae
        self._plans: dict[Hashable, Plan] = {}
        self._ready: dict[Settings, tuple[Any, Attachment]] = {}
        self._attended: set[Hashable] = set()
        self._calls = 0
        self._largest = 0
        self._batch = 1
        self._evaluations: float | None = None
        self._clock = StepClock(device, self._step_ended)
        self.record = record
        self.settings = node_request.settings

    def foresee_pixels(self, width: int, height: int, batch: int) -> None:
        """Plan a size, and the decode of it where the VAE is known; 0 is the model's own."""
        native = native_size(self._anatomy)
        width, height = width or native, height or native
        plan = self.foresee_together(width, height, batch, host.GUIDED)
        self.show(plan)
        self.record.calls = host.GUIDED / plan.request.passes
        foresee_decode(self._vae, (batch, 4, height // self._scale, width // self._scale))

    def foresee(self, width: int, height: int, batch: int, passes: int, frames: int = 1) -> Plan:
        """The plan for a size in pixels and the UNet's rows, made once."""
        key = width, height, batch, passes, frames
        if key not in self._plans:
            size = self._device, width, height, batch
            self._plans[key] = self._node_request.plan(self._anatomy, *size, passes=passes, frames=frames)
        return self._plans[key]

    def foresee_together(self, width: int, height: int, batch: int, prompts: int, frames: int = 1) -> Plan:
        """The plan for a call with the most of ``prompts`` that fit. The host makes smaller calls if
        our estimate of a call says that memory is short. If none fits, the plan is for one prompt.

        Raises:
            BudgetError: not even one fits.
        """
        for together in dict.fromkeys(max(host.calls(prompts, most)) for most in range(prompts, 1, -1)):
            with contextlib.suppress(BudgetError):
                plan = self.foresee(width, height, batch, together, frames)
                if fits(plan, "denoise"):
                    return plan
        return self.foresee(width, height, batch, 1, frames)

    def show(self, plan: Plan) -> None:
        """Put ``plan`` into the record."""
        self.record.add("denoise", plan, self._anatomy.denoiser_module, self._node_request.budget)

    def outer_sample(
        self,
        executor: Any,
        noise: Tensor,
        latents: Any = None,
        sampler: Any = None,
        sigmas: Any = None,
        mask: Any = None,
        callback: Callable[..., Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        guider = executor.class_obj
        base = guider.model_patcher.model
        shape, prompts = self._sampling_shape(guider, noise)
        plan = self._forecast = self._fitting_or_told(shape, prompts)
        self.show(plan)
        self._calls, self._largest, self._attended, self._clock = 0, 0, set(), StepClock(self._device, self._step_ended)
        steps = 0 if sigmas is None else len(sigmas) - 1
        self._evaluations = host.evaluations(sampler, sigmas)
        self.record.begin(steps, self._pixels(noise.shape), (self._evaluations or 1) * prompts / plan.request.passes)
        self._foresee_decode(noise)
        host.tell(self.record.node, verdict(self.record))
        warn_above(self.record, "denoise")
        with (
            self._recording(),
            host.replace_attribute(base, "memory_required", self._estimate_of_a_call(plan)),
            PINNED_BUFFERS.keep(),  # hooks come and go in every step
            self.record.weights_of("denoise", guider.model_patcher, room_for_weights(plan, "denoise")),
        ):
            out = executor(noise, latents, sampler, sigmas, mask, self._clock.around(callback), *args, **kwargs)
        self.record.ran(self._clock.seconds, [size / _size(self._step_plan) for size in self._clock.sizes])
        self._tell()
        return out

    def _recording(self) -> contextlib.AbstractContextManager[None]:
        """The block of a sampling whose hooks act in layers: nothing may record a call of the model."""
        return host.disable_compiler()

    def _sampling_shape(self, guider: Any, noise: Tensor) -> tuple[Sequence[int], int]:
        """The shape of the latents that a call of the model gets, and the most prompts that the host puts into one."""
        shape = host.window_shape(noise.shape, guider.model_options)
        self._batch = shape[0]
        return shape, host.prompts(guider, guider.model_options)

    @property
    def _step_plan(self) -> Plan:
        return self.record.plans["denoise"]

    def _pixels(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Width and height of the picture of latents, and their frames."""
        return shape[-1] * self._scale, shape[-2] * self._scale, shape[2] if len(shape) == 5 else 1

    def _estimate_of_a_call(self, forecast: Plan) -> Callable[..., float]:
        """Return a replacement for the host's estimate while it samples.

        It is the forecast's bytes for a call of its size, fewer for a smaller one, and more than is free for a call
        that
        would need more: the host then makes smaller calls."""
        most = _activation_bytes(forecast)

        def required_bytes(input_shape: Sequence[int], cond_shapes: Any = None) -> float:
            if not self._is_within(input_shape, forecast):
                return MORE_THAN_IS_FREE
            return most * min(1.0, self._size_of(input_shape) / _size(forecast))

        return required_bytes

    def _is_within(self, shape: Sequence[int], forecast: Plan) -> bool:
        """True if a call with latents of ``shape`` needs no more than ``forecast``."""
        came, planned = (shape[0], *self._pixels(shape)), _sides(forecast)
        if all(size <= other for size, other in zip(came, planned, strict=True)):
            return True
        if math.prod(came) > math.prod(planned):
            return False
        try:  # several areas of a picture
            return needed_bytes(self._foresee_latents(shape), "denoise") <= needed_bytes(forecast, "denoise")
        except (BadInputError, BudgetError, PlanningError):
            return False

    def _size_of(self, shape: Sequence[int]) -> int:
        """Pixels of all rows of latents of ``shape``."""
        return math.prod((shape[0], *self._pixels(shape)))

    def _step_ended(self) -> None:
        """Update the predicted time of the sampling if its steps need more or fewer calls than was expected."""
        sizes = self._clock.sizes
        if len(sizes) == 1:
            calls = sizes[0] / _size(self._step_plan) * (self._evaluations or 1)
        elif self._evaluations is None:
            calls = sum(sizes[1:]) / len(sizes[1:]) / _size(self._step_plan)
        else:
            return
        if not math.isclose(calls, self.record.calls, rel_tol=0.02):
            self.record.calls = calls
            host.tell(self.record.node, verdict(self.record))

    def _fitting_or_told(self, latents: Sequence[int], prompts: int) -> Plan:
        """The plan for ``latents``; a refusal is shown in our node too: on the sampler, which fails, the page says only
        that it did."""
        try:
            return self._fitting(latents, prompts)
        except BudgetError as error:
            host.tell(self.record.node, str(error))
            raise

    def _fitting(self, latents: Sequence[int], prompts: int) -> Plan:
        """The plan for latents of a shape, with the most of ``prompts`` in a call that fit.

        Raises:
            BudgetError: they do not fit and smaller ones would; it names a size. On a device where the host keeps all
                weights the budget may be below these alone: then the settings that take least are as good as it gets.
        """
        written = bool(self._node_request.budget.strip())
        try:
            plan = self._foresee_together(latents, prompts)
        except BudgetError as error:
            size = self._largest_fitting(latents)
            raise BudgetError(
                f"{error}{_fitting_size(size)}", needed_bytes=error.needed_bytes, stage=error.stage
            ) from None
        if not written or fits(plan, "denoise"):
            return plan
        size = self._largest_fitting(latents)
        if size is None:
            return plan
        needed = format_least(needed_bytes(plan, "denoise"))
        raise BudgetError(
            f"{plan.request.width}x{plan.request.height} does not fit: it needs at least {needed}, and the budget is "
            f"{format_size(plan.request.vram)}.{_fitting_size(size)}",
            needed_bytes=needed_bytes(plan, "denoise"),
            stage="denoise",
        )

    def _foresee_together(self, latents: Sequence[int], prompts: int) -> Plan:
        width, height, frames = self._pixels(latents)
        return self.foresee_together(width, height, self._batch, prompts, frames)

    def _largest_fitting(self, latents: Sequence[int]) -> tuple[int, int] | None:
        """About the largest size in pixels, of the shape of ``latents``, that fits; None: not even the smallest."""
        width, height, frames = self._pixels(latents)
        eighths = range(7, 0, -1)
        sizes = [(_part_of(width, part / 8), _part_of(height, part / 8)) for part in eighths]
        sizes = [size for size in dict.fromkeys(sizes) if size[0] * size[1] < width * height]

        def has_room(size: tuple[int, int]) -> bool:
            with contextlib.suppress(BudgetError):
                return fits(self.foresee(*size, self._batch, 1, frames), "denoise")
            return False

        if not sizes or not has_room(sizes[-1]):
            return None
        place = bisect.bisect_left(range(len(sizes) - 1), 1, key=lambda number: has_room(sizes[number]))
        return sizes[place]

    def _foresee_decode(self, latents: Tensor) -> None:
        """Plan the decode of what is about to be sampled; where it cannot fit, say so before the first step."""
        try:
            foresee_decode(self._vae, latents.shape)
        except BudgetError as error:
            self.record.warn(f"the decode of this size will not fit: {error}")

    def prepare_sampling(self, executor: Any, model: ModelPatcher, *args: Any, **kwargs: Any) -> Any:
        spare = host.budget("", self._device) - self.vram()
        stock = model.model.memory_required

        def required_bytes(*args: Any, **kwargs: Any) -> float:
            return self.step_bytes(stock, *args, **kwargs) + max(0, spare)

        with host.replace_attribute(model.model, "memory_required", required_bytes):
            return executor(model, *args, **kwargs)

    def step_bytes(self, stock: Callable[..., float], *args: Any, **kwargs: Any) -> float:
        """Bytes that a step needs in addition to the weights; ``stock`` is the host's own estimate."""
        return _activation_bytes(self.record.plans["denoise"])

    def vram(self) -> int:
        """Bytes of the budget."""
        return self.record.plans["denoise"].request.vram

    def apply_model(
        self,
        executor: Any,
        x: Tensor,
        t: Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        plan = self._foresee_latents(x.shape)
        try:
            return self._apply(plan, executor, x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)
        except (RuntimeError, MemoryError) as error:
            short = shortage(error, "the UNet")
        self._go_leaner(plan, short)  # outside of `except`: the frames that failed, and the tensors in them, are gone
        return self.apply_model(executor, x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)

    def _apply(
        self,
        plan: Plan,
        executor: Any,
        x: Tensor,
        t: Tensor,
        c_concat: Any,
        c_crossattn: Any,
        control: Any,
        transformer_options: dict[str, Any] | None,
        **kwargs: Any,
    ) -> Any:
        unet = executor.class_obj.diffusion_model
        unet = getattr(unet, "_orig_mod", unet)  # torch.compile's wrapper has it
        if not self._calls or _size(plan) > _size(self._step_plan):
            self.show(plan)
        settings = plan.settings
        options = dict(transformer_options or {})
        self._note(settings, options)
        if host.has_override():
            if is_needed(settings, self._node_request.settings, host.attends_fused()):
                options[DOOR] = override(settings, x.device, self._attended.add, options.get(DOOR))
            settings = dataclasses.replace(settings, **dict.fromkeys(_ATTENTION))
        attachment = self._prepare_hooks(unet, attachable(settings).of_stage("denoise"))
        self._clock.record_call(self._size_of(x.shape))
        with self._record_largest(unet, x), enter_hooks(unet, attachment):
            self.record.sites = dict(attachment.sites)
            out = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
        if attachment.runs_uncompiled is not None:
            self.record.warn(attachment.runs_uncompiled)
        self._calls += 1
        return out

    def _go_leaner(self, plan: Plan, short: Shortage) -> None:
        """Plan for less than ``plan``, with which the UNet ran out of memory, and say so."""
        make = functools.partial(plan_for_host, self._anatomy)
        plan_below = leaner(plan, short, self._node_request.settings, make)
        plan_below = dataclasses.replace(plan_below, request=plan.request)  # the budget stays
        self._plans[_key(plan)] = plan_below
        self.show(plan_below)
        self.record.warn(plan_below.fallback_steps[-1].told)

    def _foresee_latents(self, latents: Sequence[int]) -> Plan:
        """The plan for a call with latents of this shape: the host alone knows whether it runs both halves of guidance
        together, one after the other or only one, and what nodes add to them."""
        width, height, frames = self._pixels(latents)
        rows = latents[0]
        batch, passes = (self._batch, rows // self._batch) if rows % self._batch == 0 else (rows, 1)
        return self.foresee(width, height, batch, passes, frames)

    def _note(self, settings: Settings, options: dict[str, Any]) -> None:
        """Say once a sampling where somebody's node takes from us what was planned."""
        watched = [name for name in TOKEN_PATCHES if (options.get("patches") or {}).get(name)]
        if watched and (settings.guidance_in_turn or settings.transformer_chunks):
            self.record.warn(
                f"another node ({', '.join(watched)}) needs whole batches: transformers run undivided for it, and may "
                "need more memory than planned"
            )

    def _prepare_hooks(self, unet: Any, settings: Settings) -> Attachment:
        ready = self._ready.get(settings)
        if ready is None or ready[0] is not unet:
            ready = self._ready[settings] = unet, prepare(unet, settings, self._device)
        return ready[1]

    @contextlib.contextmanager
    def _record_largest(self, unet: Any, x: Tensor, anatomy: Anatomy | None = None) -> Iterator[None]:
        """Record the first of the largest calls of a sampling; all calls of that size are equal."""
        size = self._size_of(x.shape)
        if size <= self._largest or not host.is_watched(self._device):
            yield
            return
        with measured(unet, anatomy, self._device) as run:
            yield
        self._largest = size
        self.record.measured["denoise"] = run.stages

    def _tell(self) -> None:
        """The line in the log of a sampling."""
        record = self.record
        if self._attended:
            record.sites["attention"] = len(self._attended)
        logging.info(f"sd-lowvram: {run_line(record, self._calls)}")


def _part_of(side: int, part: float) -> int:
    """A multiple of 64 pixels near ``part`` of a side."""
    return max(64, round(side * part / 64) * 64)


def _fitting_size(size: tuple[int, int] | None) -> str:
    return "" if size is None else f" {size[0]}x{size[1]} fits in it"


def _key(plan: Plan) -> tuple[int, int, int, int, int]:
    asked = plan.request
    return asked.width, asked.height, asked.batch, asked.passes, asked.frames


def _sides(plan: Plan) -> tuple[int, int, int, int]:
    """Rows of a call, width and height in pixels, and frames."""
    return plan.request.shape.rows, plan.request.width, plan.request.height, plan.request.frames


def _size(plan: Plan) -> int:
    """Pixels of all rows of a call."""
    return math.prod(_sides(plan))


def _activation_bytes(plan: Plan) -> int:
    return next(stage.activation_bytes for stage in plan.stages if stage.name == "denoise")
