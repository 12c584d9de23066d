"""Hooks on a MODEL, through the wrappers of its ModelPatcher: on before each call of the UNet, off after it.

Clones of a model share one UNet, so nothing may stay on it between calls. Around a whole sampling the host's estimate
of activations is lowered to the plan's, so that it keeps more of the model on the device; while it loads the weights
it is told besides of the memory that lies outside the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from ..sd_lowvram.memory.pinned_buffers import PINNED_BUFFERS
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.models.compvis import TOKEN_PATCHES
from ..sd_lowvram.planning.fallback import Shortage, leaner, shortage
from ..sd_lowvram.planning.memory_profile import measured
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.planning.stages import native_size, scale_factor
from ..sd_lowvram.session import Attachment, entered, prepare
from ..sd_lowvram.settings import Settings
from ..sd_lowvram.units import format_size
from . import host
from .attending import DOOR, is_needed, override
from .interfaces import ModelPatcher
from .node_request import NodeRequest, PlanRecord, attachable, plan_for_host
from .refusals import denoiser_of
from .report_text import warn_above

_KEY = "sd-lowvram"
_GUIDED = 2
"""Rows of the UNet's batch for each picture, as long as nobody has said otherwise."""
_ATTENTION = ("attention", "attention_mib", "deterministic")


def optimized_model(
    model: ModelPatcher, node_request: NodeRequest, width: int, height: int, batch: int, made: PlanRecord | None = None
) -> tuple[ModelPatcher, PlanRecord]:
    """A clone of the ModelPatcher ``model`` that samples within the budget of ``node_request``, and its plan.

    Args:
        width, height: in pixels, 0 for the model's own size. Other sizes are planned when they come to the sampler.
        made: of a Plan node: what it foretold is what runs, and the record of the run.

    Raises:
        BudgetError: nothing fits. BadInputError: no UNet that we know, or a size that it cannot make.
    """
    anatomy = denoiser_of(model)
    native = native_size(anatomy)
    record = PlanRecord() if made is None else made.copy()
    hooks = _Denoiser(anatomy, record.node_request or node_request, model.load_device, record)
    if "denoise" not in hooks.record.plans:
        hooks.show(hooks.foresee(width or native, height or native, batch, _GUIDED))
    clone = model.clone()
    from comfy.patcher_extension import WrappersMP

    for door, wrapper in (
        (WrappersMP.OUTER_SAMPLE, hooks.outer_sample),
        (WrappersMP.PREPARE_SAMPLING, hooks.prepare_sampling),
        (WrappersMP.APPLY_MODEL, hooks.apply_model),
    ):
        clone.remove_wrappers_with_key(door, _KEY)  # a second node of ours replaces the first
        clone.add_wrapper_with_key(door, _KEY, wrapper)
    return clone, hooks.record


def wrappers_of(model: ModelPatcher) -> list[_Denoiser]:
    """What :func:`optimized_model` has put on ``model``."""
    by_door = getattr(model, "wrappers", {}).values()
    found = {getattr(wrapper, "__self__", None) for by_key in by_door for wrapper in by_key.get(_KEY, ())}
    return [one for one in found if isinstance(one, _Denoiser)]


class _Denoiser:
    """The wrappers of one clone, with the plans that it has made and the hooks that are ready for them."""

    def __init__(self, anatomy: Anatomy, node_request: NodeRequest, device: Any, record: PlanRecord) -> None:
        self._anatomy = anatomy
        self._scale = scale_factor(anatomy)
        self._node_request = node_request
        self._device = device
        self._plans: dict[tuple[int, int, int, int], Plan] = {}
        self._ready: dict[Settings, tuple[Any, Attachment]] = {}
        self._attended: set[Hashable] = set()
        self._calls = 0
        self._batch = 1
        self.record = record
        self.settings = self._node_request.settings
        plan = record.plan_of("denoise", anatomy.denoiser_module)
        record.plans.pop("denoise", None)
        if plan is not None:
            self._plans[_key(plan)] = plan
            self.show(plan)

    def foresee(self, width: int, height: int, batch: int, passes: int) -> Plan:
        """The plan for a size in pixels and the UNet's rows, made once."""
        key = width, height, batch, passes
        if key not in self._plans:
            self._plans[key] = self._node_request.plan(self._anatomy, self._device, width, height, batch, passes=passes)
        return self._plans[key]

    def show(self, plan: Plan) -> None:
        """Put ``plan`` into the record."""
        self.record.add("denoise", plan, self._anatomy.denoiser_module)

    def outer_sample(self, executor: Any, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
        guider = executor.class_obj
        base = guider.model_patcher.model
        self._batch = len(noise)
        rows = self._batch * host.passes(guider, guider.model_options)
        plan = self._foresee_latents(noise, rows)
        self.show(plan)
        stock = base.memory_required([rows, *noise.shape[1:]])
        factor = base.memory_usage_factor * _activation_bytes(plan) / max(stock, 1)
        self._calls, self._attended = 0, set()
        self.record.notes.clear()
        warn_above(self.record, "denoise")
        with (
            host.replaced(base, "memory_usage_factor", factor),
            PINNED_BUFFERS.kept(),
        ):  # hooks come and go in every step
            out = executor(noise, *args, **kwargs)
        self._tell()
        return out

    def prepare_sampling(self, executor: Any, model: ModelPatcher, *args: Any, **kwargs: Any) -> Any:
        plan = self.record.plans["denoise"]
        spare = host.budget("", self._device) - plan.request.vram
        needed = _activation_bytes(plan) + max(0, spare)
        with host.replaced(model.model, "memory_required", lambda *args, **kwargs: needed):
            return executor(model, *args, **kwargs)

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
        plan = self._foresee_latents(x, len(x))
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
        if not self._calls or _pixels(plan) > _pixels(self.record.plans["denoise"]):
            self.show(plan)
        settings = plan.settings
        options = dict(transformer_options or {})
        self._note(settings, options)
        if host.has_override():
            if is_needed(settings, self._node_request.settings, host.attends_fused()):
                options[DOOR] = override(settings, x.device, self._attended.add, options.get(DOOR))
            settings = dataclasses.replace(settings, **dict.fromkeys(_ATTENTION))
        attachment = self._prepared(unet, attachable(settings))
        with self._measured(unet), entered(unet, attachment):
            self.record.sites = dict(attachment.sites)
            out = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
        if attachment.runs_uncompiled is not None:
            self.record.warn(attachment.runs_uncompiled)
        self._calls += 1
        return out

    def _go_leaner(self, plan: Plan, short: Shortage) -> None:
        """Plan for less than ``plan``, with which the UNet ran out of memory, and say so."""
        make = functools.partial(plan_for_host, self._anatomy)
        found = leaner(plan, short, self._node_request.settings, make)
        found = dataclasses.replace(found, request=plan.request)  # the budget stays
        self._plans[_key(plan)] = found
        self.show(found)
        self.record.warn(found.fallback_steps[-1].told)

    def _foresee_latents(self, latents: Tensor, rows: int) -> Plan:
        """The plan for so many ``rows`` of the size of ``latents``: the host alone knows whether it runs both halves of
        guidance together, one after the other or only one, and what nodes add to them."""
        height, width = latents.shape[-2] * self._scale, latents.shape[-1] * self._scale
        batch, passes = (self._batch, rows // self._batch) if rows % self._batch == 0 else (rows, 1)
        return self.foresee(width, height, batch, passes)

    def _note(self, settings: Settings, options: dict[str, Any]) -> None:
        """Say once a sampling where somebody's node takes from us what was planned."""
        watched = [name for name in TOKEN_PATCHES if (options.get("patches") or {}).get(name)]
        if watched and (settings.guidance_in_turn or settings.transformer_chunks):
            self.record.warn(
                f"another node ({', '.join(watched)}) sees whole batches of tokens: transformers run undivided for it, "
                "and may take more than was planned"
            )

    def _prepared(self, unet: Any, settings: Settings) -> Attachment:
        ready = self._ready.get(settings)
        if ready is None or ready[0] is not unet:
            ready = self._ready[settings] = unet, prepare(unet, settings, self._device)
        return ready[1]

    @contextlib.contextmanager
    def _measured(self, unet: Any) -> Iterator[None]:
        """Record the first call of a sampling; the others are its like."""
        if self._calls:
            yield
            return
        with measured(unet) as run:
            yield
        self.record.measured["denoise"] = run.stages

    def _tell(self) -> None:
        record = self.record
        if self._attended:
            record.sites["attention"] = len(self._attended)
        plan = record.plans["denoise"]
        request = plan.request
        sites = ", ".join(f"{name} {count}" for name, count in sorted(record.sites.items())) or "none"
        logging.info(
            f"sd-lowvram: {request.width}x{request.height}, {self._calls} calls of the UNet, "
            f"activations planned {format_size(_activation_bytes(plan))}; sites: {sites}"
        )


def _key(plan: Plan) -> tuple[int, int, int, int]:
    return plan.request.width, plan.request.height, plan.request.batch, plan.request.passes


def _pixels(plan: Plan) -> int:
    return plan.request.width * plan.request.height * plan.request.shape.rows


def _activation_bytes(plan: Plan) -> int:
    return next(stage.activation_bytes for stage in plan.stages if stage.name == "denoise")
