"""Hooks on a MODEL, through the wrappers of its ModelPatcher: on before each call of the UNet, off after it.

Clones of a model share one UNet, so nothing may stay on it between calls. Around a whole sampling the host's estimate
of activations is lowered to the plan's, so that it keeps more of the model on the device; while it loads the weights
it is told besides of the memory that lies outside the budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.planning.memory_profile import measured
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.planning.stages import native_size, scale_factor
from ..sd_lowvram.session import Attachment, anatomy_of, entered, prepare
from ..sd_lowvram.settings import Settings
from ..sd_lowvram.units import format_size
from . import host
from .attending import DOOR, override
from .node_request import Record, Wish, attachable

_KEY = "sd-lowvram"
_ATTENTION = ("attention", "attention_mib", "deterministic")


def optimized_model(model: Any, wish: Wish, width: int, height: int, batch: int) -> tuple[Any, Record]:
    """A clone of the ModelPatcher ``model`` that samples within the wish's budget, and its plan.

    Args:
        width, height: in pixels, 0 for the model's own size. Other sizes are planned when they come to the sampler.

    Raises:
        BudgetError: nothing fits. BadInputError: no UNet that we know, or a size that it cannot make.
    """
    unet = model.get_model_object("diffusion_model")
    anatomy = anatomy_of(unet)
    if anatomy.denoiser is None:
        raise BadInputError(f"{type(unet).__name__} is no UNet of Stable Diffusion")
    native = native_size(anatomy)
    hooks = _Denoiser(anatomy, wish, model.load_device)
    record = hooks.foresee(width or native, height or native, batch)
    clone = model.clone()
    from comfy.patcher_extension import WrappersMP

    for door, wrapper in (
        (WrappersMP.OUTER_SAMPLE, hooks.outer_sample),
        (WrappersMP.PREPARE_SAMPLING, hooks.prepare_sampling),
        (WrappersMP.APPLY_MODEL, hooks.apply_model),
    ):
        clone.remove_wrappers_with_key(door, _KEY)  # a second node of ours replaces the first
        clone.add_wrapper_with_key(door, _KEY, wrapper)
    return clone, record


class _Denoiser:
    """The wrappers of one clone, with the plans that it has made and the hooks that are ready for them."""

    def __init__(self, anatomy: Anatomy, wish: Wish, device: Any) -> None:
        self._anatomy = anatomy
        self._scale = scale_factor(anatomy)
        self._wish = wish
        self._device = device
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._ready: dict[Settings, tuple[Any, Attachment]] = {}
        self._attended: set[Hashable] = set()
        self._calls = 0
        self._record = Record()

    def foresee(self, width: int, height: int, batch: int) -> Record:
        """Plan for a size in pixels, once."""
        key = width, height, batch
        if key not in self._plans:
            self._plans[key] = self._wish.plan(self._anatomy, self._device, *key)
        self._record.plans["denoise"] = self._plans[key]
        return self._record

    def outer_sample(self, executor: Any, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj.model_patcher.model
        record = self._foresee_latents(noise, len(noise))
        stock = base.memory_required([2 * len(noise), *noise.shape[1:]])
        factor = base.memory_usage_factor * _activation_bytes(record) / max(stock, 1)
        self._calls, self._attended = 0, set()
        with host.replaced(base, "memory_usage_factor", factor):
            out = executor(noise, *args, **kwargs)
        self._tell(record)
        return out

    def prepare_sampling(self, executor: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        spare = host.room(self._device) - self._record.plans["denoise"].request.vram
        needed = _activation_bytes(self._record) + max(0, spare)
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
        unet = executor.class_obj.diffusion_model
        unet = getattr(unet, "_orig_mod", unet)  # torch.compile's wrapper has it
        record = self._foresee_latents(x, (len(x) + 1) // 2)
        settings = record.plans["denoise"].settings
        options = dict(transformer_options or {})
        if host.has_override():
            options[DOOR] = override(settings, x.device, self._attended.add, options.get(DOOR))
            settings = dataclasses.replace(settings, **dict.fromkeys(_ATTENTION))
        attachment = self._prepared(unet, attachable(settings))
        with self._measured(unet, record), entered(unet, attachment):
            record.sites = dict(attachment.sites)
            out = executor(x, t, c_concat, c_crossattn, control, options, **kwargs)
        self._calls += 1
        return out

    def _foresee_latents(self, latents: Tensor, batch: int) -> Record:
        """The record with the plan for ``latents``: the present one where it is of this size and not too small."""
        height, width = latents.shape[-2] * self._scale, latents.shape[-1] * self._scale
        now = self._record.plans["denoise"].request
        if (now.width, now.height) == (width, height) and batch <= now.batch:
            return self._record
        return self.foresee(width, height, batch)

    def _prepared(self, unet: Any, settings: Settings) -> Attachment:
        ready = self._ready.get(settings)
        if ready is None or ready[0] is not unet:
            ready = self._ready[settings] = unet, prepare(unet, settings, self._device)
        return ready[1]

    @contextlib.contextmanager
    def _measured(self, unet: Any, record: Record) -> Iterator[None]:
        """Record the first call of a sampling; the others are its like."""
        if self._calls:
            yield
            return
        with measured(unet) as run:
            yield
        record.measured["denoise"] = run.stages

    def _tell(self, record: Record) -> None:
        if self._attended:
            record.sites["attention"] = len(self._attended)
        request = record.plans["denoise"].request
        sites = ", ".join(f"{name} {count}" for name, count in sorted(record.sites.items())) or "none"
        logging.info(
            f"sd-lowvram: {request.width}x{request.height}, {self._calls} calls of the UNet, "
            f"activations planned {format_size(_activation_bytes(record))}; sites: {sites}"
        )


def _activation_bytes(record: Record) -> int:
    stages = record.plans["denoise"].stages
    return next(stage.activation_bytes for stage in stages if stage.name == "denoise")
