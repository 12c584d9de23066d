"""A MODEL that our hooks do not know, within a budget: foretold and bounded, and run as the host runs it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..sd_lowvram.errors import BudgetError, PlanningError
from ..sd_lowvram.models import anatomy_of_components
from ..sd_lowvram.planning.memory_profile import measured
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.settings import Settings
from . import host
from .denoiser import Denoiser
from .hosted import COMPONENT, Traced, given_by
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
        self._frames = 1
        record.say(f"{traced.name} runs as ComfyUI runs it; the budget bounds its weights beside what a step takes")
        asked = [knob.label for _, knob, _ in node_request.settings.of_stage("denoise").decided() if _acts(knob)]
        if asked:
            record.say(f"not for {traced.name}, which has none of the layers: {', '.join(asked)}")

    def foresee_pixels(self, width: int, height: int, batch: int) -> None:
        try:
            super().foresee_pixels(width, height, batch)
        except PlanningError as error:
            self._untold(error)

    def foresee(self, width: int, height: int, batch: int, passes: int) -> Plan:
        asked = self._traced.given, self._frames, width, height, batch, passes
        if asked not in self._plans:
            make = self._node_request.plan
            size = self._device, width, height, batch
            self._plans[asked] = self._traced.plan(
                lambda anatomy: make(anatomy, *size, passes=passes, frames=self._frames)
            )
        return self._plans[asked]

    def show(self, plan: Plan) -> None:
        self.record.untold = ""
        self.record.add("denoise", plan, self._traced.unet)

    def outer_sample(self, executor: Any, noise: Tensor, *args: Any, **kwargs: Any) -> Any:
        guider = executor.class_obj
        self._traced.given = given_by(getattr(guider, "conds", {}))
        self._frames = noise.shape[2] if noise.dim() == 5 else 1
        self._batch = len(noise)
        try:
            if noise.dim() not in (4, 5):
                raise PlanningError(f"latents of {tuple(noise.shape)} are no pictures")
            self._foresee_latents(noise, self._batch * host.passes(guider, guider.model_options))
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
        room = self.vram() - int(patcher.model.memory_required([2 * len(noise), *noise.shape[1:]]))
        with self.record.weights_of("denoise", patcher, room):
            return executor(noise, *args, **kwargs)

    def _untold(self, error: PlanningError) -> None:
        cause = error.__cause__ or error
        of_values = "DataDependent" in type(cause).__name__
        why = "its code hangs on values" if of_values else str(cause).splitlines()[0][:200]
        self.record.untold = (
            f"not foretold: a step of {self._traced.name} cannot be traced ({why}). ComfyUI is asked for its own "
            "estimate of a step, and the budget bounds the weights beside it"
        )
        self.record.plans.pop("denoise", None)

    def needed_beside(self, stock: Callable[..., float], *args: Any, **kwargs: Any) -> float:
        """Bytes for a step: by the plan, or by the host's own estimate."""
        if "denoise" in self.record.plans:
            return super().needed_beside(stock, *args, **kwargs)
        return float(stock(*args, **kwargs))

    def vram(self) -> int:
        return host.budget(self._node_request.budget, self._device)

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._clock.called()
        call = _Called(self._traced.unet, executor)
        with self._measured(call):
            out = call(*args, **kwargs)
        self._calls += 1
        return out

    @contextlib.contextmanager
    def _measured(self, unet: Any) -> Iterator[None]:
        if self._calls or "denoise" not in self.record.plans or not host.is_watched(self._device):
            yield
            return
        anatomy = anatomy_of_components(self._traced.anatomy.family, {COMPONENT: unet})
        with measured(unet, anatomy, self._device) as run:
            yield
        self.record.measured["denoise"] = run.stages


def _acts(knob: Any) -> bool:
    """Whether a knob is about the layers of the model alone."""
    return bool(knob.hook) and knob.stages == ("denoise",)
