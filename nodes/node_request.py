"""A node's request and its plans. The host moves the weights, so the plan's placement is advice."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sd_lowvram.devices.info import available_ram
from ..sd_lowvram.memory.reserved import allocation_graph
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.planning.plan import Plan
from ..sd_lowvram.planning.request import DEFAULT_STEPS, Request, request_for
from ..sd_lowvram.saved_latents.hosted import CHOICES
from ..sd_lowvram.settings import Settings, knobs
from . import host
from .dynamic_vram import limit_weights, paged_bytes
from .loading import plan_beside


@dataclass(frozen=True)
class ChosenSettings:
    """Output of Low VRAM Settings, LOWVRAM_SETTINGS.

    Attributes:
        save_latents: one of ``CHOICES``, for VAE Decode (low VRAM).
    """

    settings: Settings = field(default_factory=Settings)
    save_latents: str = CHOICES[0]


def settings_or_default(settings: ChosenSettings | None) -> ChosenSettings:
    """``settings``, or those that leave everything to the plan."""
    return ChosenSettings() if settings is None else settings


@dataclass(frozen=True)
class NodeRequest:
    """A budget as it was written, the knobs that are fixed, and the steps of the predicted times."""

    budget: str
    settings: Settings
    steps: int = DEFAULT_STEPS

    def plan(
        self,
        anatomy: Anatomy,
        device: torch.device,
        width: int,
        height: int,
        batch: int,
        *,
        passes: int,
        encodes: bool = False,
        frames: int = 1,
    ) -> Plan:
        """Return the fastest settings that fit together with the weights that the host keeps.

        Raises:
            BudgetError: nothing fits; the error has the smallest budget that works.
            BadInputError: a size or a budget that cannot be used.
        """
        request = request_for(
            anatomy,
            vram=host.budget(self.budget, device),
            ram=available_ram(),
            width=width,
            height=height,
            batch=batch,
            steps=self.steps,
            passes=passes,
            encodes=encodes,
            frames=frames,
            device=device,
            fills=bool(self.budget),
        )
        return plan_for_host(anatomy, request, self.settings)


def plan_for_host(anatomy: Anatomy, request: Request, settings: Settings) -> Plan:
    """Return the fastest settings that fit ``request`` together with the weights that the host keeps.

    The layout of maps is the host's own, and so is inference mode, which no node attaches (``attachable``): a plan must
    not count what our hook for it saves.

    Raises:
        BudgetError: nothing fits.
    """
    fixed = dataclasses.replace(settings, channels_last=False, packed_weights=False, inference_mode=False)
    compiled = anatomy.family.hosted and host.compiles(anatomy.denoiser_module, request.device)
    with allocation_graph(compiled):
        return plan_beside(host.loading(request.device), anatomy, request, fixed)


def attachable(settings: Settings) -> Settings:
    """``settings`` without the knobs that the host, or a node of ours, answers for by other means than hooks."""
    theirs = [name for name, knob in knobs().items() if "node" not in knob.surfaces]
    return dataclasses.replace(settings, **dict.fromkeys([*theirs, "decoder_device", "largest_mib"]))


_ORDER = ("encode", "denoise", "decode")
"""Order of the stages in a run and in reports."""


@dataclass(eq=False)
class PlanRecord:
    """Predictions of plans and measurements of their runs; passed from Low VRAM to Report as LOWVRAM_PLAN.

    Attributes:
        node: id of the node that shows the verdict; None if none does while the workflow runs.
        plans: the latest plan of each stage, by name, in the order of a run.
        steps: steps of the latest sampling, from the sampler; 0 before the first.
        size: width and height in pixels, and frames, of the latest sampling; None before the first.
        calls: planned calls of the model in each step of the sampler; a smaller call counts as its part.
        measured: the latest run of each stage, measured by the allocator.
        seconds: seconds of each stage, from its first step to its last.
        step_seconds: seconds of each step in which the model ran.
        step_calls: planned calls of the model in each of these steps.
        kept: bytes of a stage's weights that the host held on the device in its latest run.
        paged: the part of ``kept`` that torch's allocator does not see, under dynamic VRAM.
        bounds: bytes to which ``paged`` was limited.
        sites: number of sites of each hook in the latest call of the model.
        notes: sentences on the latest sampling.
        standing: sentences on the models, for every sampling.
        budgets: budgets as written, for each stage; empty: free memory.
        untold: the reason why the sampling cannot be predicted; empty if it can.
    """

    node: str | None = None
    plans: dict[str, Plan] = field(default_factory=dict)
    steps: int = 0
    size: tuple[int, int, int] | None = None
    calls: float = 1.0
    measured: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    step_calls: list[float] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    paged: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    sites: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)
    budgets: dict[str, str] = field(default_factory=dict)
    untold: str = ""
    _models: dict[str, Any] = field(default_factory=dict)

    def add(self, stage: str, plan: Plan, model: Any, budget: str) -> None:
        """Put in the ``plan`` of a stage of ``model`` for a budget as it was written."""
        plans = {**self.plans, stage: plan}
        self.plans = {name: plans[name] for name in _ORDER if name in plans}
        self._models[stage] = weakref.ref(model)
        self.budgets[stage] = budget.strip()

    def begin(self, steps: int, size: tuple[int, int, int] | None = None, calls: float = 1.0) -> None:
        """Forget the sampling before, as one of ``steps`` begins."""
        self.steps, self.size, self.calls = steps, size, calls
        self.step_seconds, self.step_calls = [], []
        self.notes.clear()
        for figures in (self.measured, self.seconds, self.kept, self.paged, self.bounds):
            for stage in ("denoise", "decode"):
                figures.pop(stage, None)

    def ran(self, seconds: list[float], calls: list[float]) -> None:
        """Add the seconds of each step of a sampling; the first step, in which a model warms up, counts least."""
        self.step_seconds, self.step_calls = seconds, calls
        like = calls[1:] or calls
        if like:
            self.calls = sum(like) / len(like)

    @contextlib.contextmanager
    def weights_of(self, stage: str, patcher: Any, capacity: int) -> Iterator[None]:
        """Run ``stage`` within the block; of ``patcher``, dynamic VRAM holds up to ``capacity`` bytes of weights.

        The bytes that the host held are recorded."""
        with limit_weights(patcher, capacity, lambda size: self.bounds.update({stage: size}), self.warn):
            yield
            self.kept[stage], self.paged[stage] = host.loaded_bytes(patcher), paged_bytes(patcher)

    def warn(self, sentence: str) -> None:
        """Note ``sentence`` on the run, and say it in the log and on the node that runs."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            logging.warning(f"sd-lowvram: {sentence}")
            host.show(sentence)

    def say(self, sentence: str) -> None:
        """Add ``sentence`` to the report on the models."""
        if sentence not in self.standing:
            self.standing.append(sentence)

    def model_of(self, stage: str) -> Any:
        """The model that the plan of a stage was made for; None when it is gone."""
        return self._models.get(stage, lambda: None)()
