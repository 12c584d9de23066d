"""A MODEL without sites for our hooks, within a budget: predicted and limited, and run as the host runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..sd_lowvram.errors import BadInputError, BudgetError, PlanningError
from ..sd_lowvram.models import anatomy_of_components
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.settings import Settings
from . import host
from .denoiser import MORE_THAN_IS_FREE, Denoiser
from .hosted import COMPONENT, Traced, longest_conditions
from .interfaces import HostVAE
from .node_request import NodeRequest, PlanRecord


class _Called(nn.Module):
    """A call of the host's, in which ``model`` runs."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class HostedDenoiser(Denoiser):
    """The wrappers of one clone. Nothing is set on the model: its plans are traces of it as it is."""

    def __init__(
        self, traced: Traced, node_request: NodeRequest, device: Any, record: PlanRecord, vae: HostVAE | None
    ) -> None:
        plain = dataclasses.replace(node_request, settings=Settings())
        super().__init__(traced.anatomy, plain, device, record, vae)
        self._traced = traced
        record.say(f"{traced.name} runs as in ComfyUI; the budget limits the weights in VRAM")
        asked = [knob.label for _, knob, _ in node_request.settings.of_stage("denoise").decided() if _acts(knob)]
        if asked:
            record.say(f"without effect, as {traced.name} runs unchanged: {', '.join(asked)}")

    def foresee_pixels(self, width: int, height: int, batch: int) -> None:
        """Plan a picture of this size; if the model cannot be traced, report that there is no prediction."""
        try:
            super().foresee_pixels(width, height, batch)
        except PlanningError as error:
            self._untold(error)

    def foresee(self, width: int, height: int, batch: int, passes: int, frames: int = 1) -> Plan:
        """Plan a call of this size by a trace, once."""
        asked = self._traced.given, width, height, batch, passes, frames
        if asked not in self._plans:
            make = self._node_request.plan
            size = self._device, width, height, batch
            self._plans[asked] = self._traced.plan(lambda anatomy: make(anatomy, *size, passes=passes, frames=frames))
        return self._plans[asked]

    def show(self, plan: Plan) -> None:
        self.record.untold = ""
        self.record.add("denoise", plan, self._traced.unet, self._node_request.budget)

    def outer_sample(self, executor: Any, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a sampling with the weights limited to the budget."""
        guider = executor.class_obj
        self._traced.given = longest_conditions(getattr(guider, "conds", {}))
        try:
            if noise.dim() not in (4, 5):
                raise PlanningError(f"latents of {tuple(noise.shape)} are not pictures")
            self._foresee_together(*self._sampling_shape(guider, noise))
        except BudgetError:
            pass  # said with the sizes that fit
        except PlanningError as error:
            return self._unforetold(error, executor, noise, *args, **kwargs)
        return super().outer_sample(executor, noise, *args, **kwargs)

    def _recording(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is hooked in there, so the host may record what it likes."""
        return contextlib.nullcontext()

    def _unforetold(self, error: PlanningError, executor: Any, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A sampling of which nothing is known but the budget."""
        self._untold(error)
        self._calls = 0
        self.record.begin(0)
        host.tell(self.record.node, self.record.untold)
        patcher = executor.class_obj.model_patcher
        stock = patcher.model.memory_required
        most = stock([host.GUIDED * len(noise), *noise.shape[1:]])

        def required_bytes(input_shape: Sequence[int], cond_shapes: Any = None) -> float:
            estimate: float = stock(input_shape)
            return estimate if estimate <= most else MORE_THAN_IS_FREE

        with (
            host.replace_attribute(patcher.model, "memory_required", required_bytes),
            self.record.weights_of("denoise", patcher, self.vram() - int(most)),
        ):
            return executor(noise, *args, **kwargs)

    def _untold(self, error: PlanningError) -> None:
        cause = error.__cause__ or error
        logging.info(f"sd-lowvram: a step of {self._traced.name} cannot be traced: {type(cause).__name__}: {cause}")
        self.record.untold = (
            f"no prediction for {self._traced.name}: ComfyUI's own estimate of a step is used, and the budget limits "
            "the weights in VRAM"
        )
        self.record.plans.pop("denoise", None)

    def step_bytes(self, stock: Callable[..., float], *args: Any, **kwargs: Any) -> float:
        """Bytes for a step: by the plan, or by the host's own estimate."""
        if "denoise" in self.record.plans:
            return super().step_bytes(stock, *args, **kwargs)
        return float(stock(*args, **kwargs))

    def vram(self) -> int:
        return host.budget(self._node_request.budget, self._device)

    def apply_model(self, executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _Called(self._traced.unet, executor)
        if "denoise" in self.record.plans:
            self._look_at(x.shape)
            self._clock.record_call(self._size_of(x.shape))
            anatomy = anatomy_of_components(self._traced.anatomy.family, {COMPONENT: call})
            with self._record_largest(call, x, anatomy):
                out = call(x, *args, **kwargs)
        else:
            out = call(x, *args, **kwargs)
        self._calls += 1
        return out

    def _look_at(self, shape: Sequence[int]) -> None:
        """Show the plan for the pieces of a picture with which the model is called; say so where a call is larger than
        was planned."""
        if not self._is_within(shape, self._forecast):
            width, height, _ = self._pixels(shape)
            self.record.warn(
                f"another node calls the model with {shape[0]} x {width}x{height} at a time, more than was planned: "
                f"that may need more memory than predicted, and {self._traced.name} cannot be divided"
            )
        elif self._pixels(shape) == _piece(self._forecast):
            if _piece(self._step_plan) != _piece(self._forecast):
                self.show(self._forecast)
        elif not self._calls:
            with contextlib.suppress(BadInputError, BudgetError, PlanningError):
                self.show(self._foresee_latents(shape))


def _piece(plan: Plan) -> tuple[int, int, int]:
    return plan.request.width, plan.request.height, plan.request.frames


def _acts(knob: Any) -> bool:
    """True if a knob acts on the layers of the model alone."""
    return bool(knob.hook) and knob.stages == ("denoise",)
