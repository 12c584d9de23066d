"""Plans with ComfyUI's own loading: our hooks limit the activations, and the host decides which weights it keeps.

If not all weights fit, the host keeps the largest layers and copies each of the rest in for its call.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from ..sd_lowvram.errors import BudgetError
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.planning.plan import Plan, StagePlan, most_kept
from ..sd_lowvram.planning.request import Request
from ..sd_lowvram.planning.search import make_plan
from ..sd_lowvram.settings import Settings
from ..sd_lowvram.weights import all_tensors, weight_bytes

_SHARES = (1.0, 0.5, 0.0)
"""Shares of the weights beyond the least that plans try; fewer weights leave memory for faster activations."""


@dataclass(frozen=True)
class Loading:
    """The host's rule for keeping a model's weights on a device.

    Attributes:
        whole: True if it always keeps all of them: on a CPU, and with --highvram.
        least, most: smallest and largest number of bytes that it keeps.
        reserve: bytes that it leaves free in addition to a request.
    """

    whole: bool = True
    least: int = 0
    most: int = 0
    reserve: int = 0

    def resident_bytes(self, weights: int, vram: int, activations: int) -> int:
        """Bytes of ``weights`` on a device of which ``vram`` may be used, in addition to ``activations``."""
        if self.whole:
            return weights
        return min(weights, max(self.least, min(self.most, vram - activations - self.reserve)))

    def stage(self, stage: StagePlan, request: Request, weights: int, layer: int) -> tuple[int, int]:
        """Bytes of ``weights`` that stay on the device in a stage, and of those that are copied in among them.

        Args:
            layer: bytes of the largest layer.
        """
        resident = self.resident_bytes(weights, request.vram, stage.activation_bytes)
        return resident, min(layer, weights - resident)


_PAGE = 32 << 20
_CHUNK = 16 << 20


@dataclass(frozen=True)
class InRange(Loading):
    """The rule of dynamic VRAM, whose watermark we set: whole pages up to the rest of the budget.

    The rest is the budget less activations, the libraries' workspaces and the buffers for streamed weights."""

    whole: bool = False

    @staticmethod
    def pages(size: int) -> int:
        """Bytes of the whole pages within ``size`` bytes."""
        return max(0, size) // _PAGE * _PAGE

    @staticmethod
    def buffers(layer: int) -> int:
        """Bytes of the buffers of two streams of copies, which grow with the largest layer that passes."""
        return 2 * -(-layer // _CHUNK) * _CHUNK

    def stage(self, stage: StagePlan, request: Request, weights: int, layer: int) -> tuple[int, int]:
        capacity = min(self.most, request.vram - request.overhead_bytes) - non_weight_bytes(stage)
        if weights <= capacity:
            return weights, 0
        return min(weights, self.pages(capacity - self.buffers(layer))), self.buffers(layer)


def non_weight_bytes(stage: StagePlan) -> int:
    """Bytes that a stage needs on the device in addition to its weights, workspaces included."""
    return stage.reserved_bytes - stage.weights_bytes


def plan_beside(loading: Loading, anatomy: Anatomy, request: Request, settings: Settings) -> Plan:
    """The fastest settings for ``anatomy``'s one model that fit while the host moves its weights.

    If the host keeps all of them whatever is requested, and nothing fits next to them, it is the settings that take
    least, and the plan says that it does not fit.

    Raises:
        BudgetError: nothing fits, with as few weights on the device as the host can do with.
    """
    ((name, module),) = anatomy.components.items()
    weights = weight_bytes(module)
    if loading.whole:
        loaded_anatomy = dataclasses.replace(anatomy, kept={name: weights})
        plan = _fitting_or_leanest(loaded_anatomy, request, settings.filled(offload="none"))
        return _loaded_plan(plan, loading, weights, 0)
    least = min(weights, loading.least)
    plans: list[Plan] = []
    refused: BudgetError | None = None
    for share in _SHARES:
        passing = loading.buffers(layer_bytes(module)) if isinstance(loading, InRange) and share < 1 else 0
        loaded_anatomy = dataclasses.replace(anatomy, kept={name: least + int(share * (weights - least)) + passing})
        try:
            plan = make_plan(loaded_anatomy, request, settings.filled(offload="none"), least=False)
        except BudgetError as error:
            refused = error
            continue
        plans.append(_loaded_plan(plan, loading, weights, layer_bytes(module)))
        if plan.next_faster is None:
            break
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=lambda plan: plan.predicted.seconds)


def _fitting_or_leanest(anatomy: Anatomy, request: Request, settings: Settings) -> Plan:
    """The fastest settings that fit ``request``, or those that take the least of the device."""
    asked = request
    while True:
        try:
            return dataclasses.replace(make_plan(anatomy, asked, settings, least=False), request=request)
        except BudgetError as error:
            if error.limit != "vram" or error.needed_bytes <= asked.vram:
                raise
            asked = dataclasses.replace(asked, vram=error.needed_bytes)


def _loaded_plan(plan: Plan, loading: Loading, weights: int, layer: int) -> Plan:
    """``plan`` with the weights as the host will have them.

    Args:
        layer: bytes of the largest, which is copied in among them.
    """
    stages = tuple(_stage(stage, plan.request, loading, weights, layer) for stage in plan.stages)
    worst = max(stages, key=lambda stage: stage.reserved_bytes)
    same = ("peak_bytes", "reserved_bytes", "weights_bytes", "activation_bytes", "host_bytes", "largest_bytes")
    predicted = dataclasses.replace(
        plan.predicted,
        **{name: getattr(worst, name) for name in same},
        seconds=sum(stage.seconds for stage in stages),
        stage=worst.name,
        kept_bytes=most_kept(stages),
    )
    fits = worst.reserved_bytes + predicted.overhead_bytes <= plan.request.vram
    return dataclasses.replace(plan, stages=stages, predicted=predicted, fits=fits)


def _stage(stage: StagePlan, request: Request, loading: Loading, weights: int, layer: int) -> StagePlan:
    if not stage.activation_bytes:  # it runs elsewhere
        return stage
    resident, passing = loading.stage(stage, request, weights, layer)
    moved, here = weights - resident, resident + passing
    copies = request.steps if stage.name == "denoise" else 1
    return dataclasses.replace(
        stage,
        weights_bytes=here,
        peak_bytes=here + stage.activation_bytes,
        reserved_bytes=here + non_weight_bytes(stage),
        host_bytes=moved + stage.parked_bytes,
        seconds=stage.seconds + copies * moved / request.rates.copy_bandwidth,
    )


def layer_bytes(module: nn.Module) -> int:
    """Bytes of the largest weight of ``module``."""
    return max((tensor.numel() * tensor.element_size() for tensor in all_tensors(module)), default=0)
