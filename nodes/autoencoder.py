"""Hooks on a VAE: on a copy of the host's object whose decode and encode attach them around the stock ones.

The copy shares the weights with the original and leaves it untouched. It asks the host for what the plan needs. Exact
strips take the place of the host's approximate tiles, for which its tiled nodes ask; when memory runs out all the same,
a leaner plan does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sd_lowvram.errors import BadInputError, BudgetError
from ..sd_lowvram.models.causal_autoencoder import FRAMES
from ..sd_lowvram.models.latents import has_frames, scale_factor
from ..sd_lowvram.planning.fallback import Shortage, leaner, shortage
from ..sd_lowvram.planning.memory_profile import measured
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.planning.request import Request
from ..sd_lowvram.session import Attachment, enter_hooks, prepare
from ..sd_lowvram.settings import Settings
from . import host
from .interfaces import HostVAE
from .node_request import ChosenSettings, NodeRequest, PlanRecord, attachable, plan_for_host, settings_or_default
from .refusals import autoencoder_of
from .report_text import room_for_weights, warn_above


def optimized_vae(vae: HostVAE, node_request: NodeRequest, record: PlanRecord | None = None) -> HostVAE:
    """A copy of the host's VAE object that decodes and encodes exactly, within the budget of ``node_request``.

    Args:
        record: where plans and measurements go.

    Raises:
        BadInputError: an autoencoder of another kind than Stable Diffusion's.
    """
    hooks = _Autoencoder(vae, node_request, PlanRecord() if record is None else record)
    optimized = copy.copy(vae)
    optimized.decode, optimized.encode = hooks.decode, hooks.encode
    optimized.decode_tiled, optimized.encode_tiled = hooks.decode_tiled, hooks.encode_tiled
    optimized.memory_used_decode = functools.partial(hooks.memory_used, "decode", False, vae.memory_used_decode)
    optimized.memory_used_encode = functools.partial(hooks.memory_used, "encode", False, vae.memory_used_encode)
    return optimized


def optimize_again(vae: HostVAE, budget: str, settings: ChosenSettings | None) -> tuple[HostVAE, PlanRecord]:
    """``vae`` optimized by what a node of the VAE was asked for, and the record of that.

    Where it comes from Low VRAM, what is not said here is as it was said there, and the record is that node's.
    """
    hooks = hooks_of(vae)
    if hooks is None:
        record, request = PlanRecord(), NodeRequest(budget, settings_or_default(settings).settings)
    else:
        record, before = hooks.record, hooks.node_request
        request = NodeRequest(
            budget if budget.strip() else before.budget, before.settings if settings is None else settings.settings
        )
    return optimized_vae(vae, request, record), record


def hooks_of(vae: HostVAE) -> _Autoencoder | None:
    """Hooks that :func:`optimized_vae` has put on ``vae``."""
    hooks = getattr(vars(vae).get("decode"), "__self__", None)
    return hooks if isinstance(hooks, _Autoencoder) else None


def foresee_decode(vae: HostVAE | None, shape: Sequence[int]) -> None:
    """Put the plan for decoding (N, C, [frames,] h, w) latents into the record of an optimized ``vae``; other VAEs have
    none.

    Raises:
        BudgetError: nothing fits.
    """
    hooks = None if vae is None else hooks_of(vae)
    if hooks is not None and len(shape) in (4, 5):
        hooks.foresee("decode", shape)


def plan_autoencoder(vae: HostVAE, node_request: NodeRequest, record: PlanRecord, request: Request) -> None:
    """Write the plan for decoding the pictures of ``request`` into ``record``; nothing is attached.

    Raises:
        BudgetError: nothing fits. BadInputError: as :func:`optimized_vae`.
    """
    scale = scale_factor(autoencoder_of(vae))
    latents = request.batch, 4, request.height // scale, request.width // scale
    _Autoencoder(vae, node_request, record).foresee("decode", latents)


class _OnDeviceError(Exception):
    """The stock call ran out of memory and wants its tiles."""


class _Autoencoder:
    """Stock calls on a plain copy of the VAE, under the hooks of the plan for each size."""

    def __init__(self, vae: HostVAE, node_request: NodeRequest, record: PlanRecord) -> None:
        self._anatomy = autoencoder_of(vae)
        self._vae = vae
        self.node_request = node_request
        self.record = record
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._ready: dict[tuple[Settings, torch.device], Attachment] = {}

    def decode(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._run("decode", False, samples.shape, samples, *args, **kwargs)

    def encode(self, pixels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._run("encode", False, pixels.movedim(-1, 1).shape, pixels, *args, **kwargs)

    def decode_tiled(self, samples: Tensor, *tiles: Any, **named_tiles: Any) -> Tensor:
        """Decode for the stock VAE Decode (Tiled), by exact strips in place of its tiles."""
        return self._run("decode", True, samples.shape, samples)

    def encode_tiled(self, pixels: Tensor, *tiles: Any, **named_tiles: Any) -> Tensor:
        """Encode for the stock VAE Encode (Tiled), by exact strips in place of its tiles."""
        return self._run("encode", True, pixels.movedim(-1, 1).shape, pixels)

    def memory_used(
        self, stage: str, tiled: bool, stock: Callable[..., int], shape: Sequence[int], dtype: torch.dtype
    ) -> int:
        """Bytes of activations that are requested from the host, by the plan, for (N, C, [frames,] h, w) latents or
        pixels.
        """
        if len(shape) not in (4, 5):
            return stock(shape, dtype)
        return next(
            planned.activation_bytes for planned in self.foresee(stage, shape, tiled).stages if planned.name == stage
        )

    def foresee(self, stage: str, shape: Sequence[int], tiled: bool = False) -> Plan:
        """The plan for (N, C, [frames,] h, w) latents to decode or pixels to encode, made once; where the host asks for
        tiles, of exact ones, unless other ones are set."""
        scale = scale_factor(self._anatomy)
        pixels = (side * scale if stage == "decode" else side // scale * scale for side in shape[-2:])
        height, width = pixels
        batch, frames = self._pictures(stage, shape)
        key = stage, tiled, width, height, batch, frames
        if key not in self._plans:
            settings = self._settings_with_tiles(tiled)
            request = dataclasses.replace(self.node_request, settings=settings)
            size = self._device(settings), width, height, batch
            encodes = stage == "encode"
            self._plans[key] = request.plan(self._anatomy, *size, passes=1, encodes=encodes, frames=frames)
        self.record.add(stage, self._plans[key], self._vae.first_stage_model, self.node_request.budget)
        return self._plans[key]

    def _pictures(self, stage: str, shape: Sequence[int]) -> tuple[int, int]:
        """Number of pictures in ``shape``, and of their frames of latents.

        For an autoencoder of frames the host encodes several pictures as the frames of one video."""
        if not has_frames(self._anatomy):
            return shape[0], 1
        batch, frames = (shape[0], shape[2]) if len(shape) == 5 else (1, shape[0])
        if stage == "encode":
            return batch, 1 + (frames - 1) // FRAMES
        return (batch, frames) if len(shape) == 5 else (frames, 1)

    def _settings_with_tiles(self, tiled: bool) -> Settings:
        settings = self.node_request.settings
        return settings.filled(vae_tiles="exact") if tiled else settings

    def _device(self, settings: Settings) -> torch.device:
        return torch.device("cpu") if settings.decoder_device == "cpu" else self._vae.device

    def _run(self, stage: str, tiled: bool, shape: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        if len(shape) not in (4, 5):
            raise BadInputError(f"{stage}: {tuple(shape)} is not the shape of one picture or a batch of them")
        call = self._call(stage)
        with host.bar():
            while True:
                plan = self.foresee(stage, shape, tiled)
                warn_above(self.record, stage)
                try:
                    with self._hooked_copy(stage, tiled, plan) as vae:
                        return call(vae, *args, **kwargs)
                except _OnDeviceError:
                    short = Shortage(stage, of_host=False)
                except (RuntimeError, MemoryError) as error:
                    short = shortage(error, stage)
                self._go_leaner(stage, tiled, plan, short)

    def _go_leaner(self, stage: str, tiled: bool, plan: Plan, short: Shortage) -> None:
        """Plan for less than ``plan``, with which ``stage`` ran out of memory, and say so; where nothing is leaner the
        host gets it in its own way."""
        make = functools.partial(plan_for_host, self._anatomy)
        try:
            plan_below = leaner(plan, short, self._settings_with_tiles(tiled), make)
        except BudgetError as error:
            from comfy.model_management import OOM_EXCEPTION

            raise OOM_EXCEPTION(str(error)) from None
        self._plans[_key(stage, tiled, plan)] = dataclasses.replace(
            plan_below, request=plan.request
        )  # the budget stays
        self.record.warn(plan_below.fallback_steps[-1].told)

    def _call(self, stage: str) -> Callable[..., Tensor]:
        """The host's own call, of a VAE and its arguments, or what somebody else has set on this VAE in its place."""
        set_here = vars(self._vae).get(stage)
        if set_here is None or isinstance(getattr(set_here, "__self__", None), _Autoencoder):
            stock: Callable[..., Tensor] = getattr(type(self._vae), stage)
            return stock
        return lambda vae, *args, **kwargs: set_here(*args, **kwargs)

    @contextlib.contextmanager
    def _hooked_copy(self, stage: str, tiled: bool, plan: Plan) -> Iterator[Any]:
        """A plain copy of the VAE, its model with the hooks of ``plan``."""
        settings = plan.settings
        vae, device = copy.copy(self._vae), self._device(settings)
        for name in ("decode", "encode", "decode_tiled", "encode_tiled"):
            vars(vae).pop(name, None)
        for name in _TILED:
            setattr(vae, name, _refuse_tiles)
        vae.memory_used_decode = functools.partial(self.memory_used, "decode", tiled, self._vae.memory_used_decode)
        vae.memory_used_encode = functools.partial(self.memory_used, "encode", tiled, self._vae.memory_used_encode)
        if device != vae.device:
            vae.device, vae.patcher = device, vae.patcher.clone()
            vae.patcher.load_device = device
        model = vae.first_stage_model
        wanted = attachable(settings).of_stage(stage)
        if (wanted, device) not in self._ready:
            self._ready[wanted, device] = prepare(model, wanted, device)
        attachment = self._ready[wanted, device]
        with contextlib.ExitStack() as stack:
            stack.enter_context(host.disable_compiler())
            stack.enter_context(enter_hooks(model, attachment))
            run = stack.enter_context(measured(model)) if host.is_watched(device) else None
            stack.enter_context(
                self.record.weights_of(stage, getattr(vae, "patcher", None), room_for_weights(plan, stage))
            )
            begun = time.monotonic()
            yield vae
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.record.seconds[stage] = time.monotonic() - begun
        if run is not None:
            self.record.measured[stage] = run.stages
        sites = ", ".join(f"{name} {count}" for name, count in sorted(attachment.sites.items())) or "none"
        logging.debug(f"sd-lowvram: {stage}, sites: {sites}")


_TILED = ("decode_tiled_", "encode_tiled_", "decode_tiled_3d", "encode_tiled_3d")
"""The host's methods for the case that memory runs out."""


def _key(stage: str, tiled: bool, plan: Plan) -> tuple[Any, ...]:
    return stage, tiled, plan.request.width, plan.request.height, plan.request.batch, plan.request.frames


def _refuse_tiles(*args: Any, **kwargs: Any) -> Any:
    raise _OnDeviceError
