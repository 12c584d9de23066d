"""Two MODELs that alternate in one sampling, through the wrappers of the first one's ModelPatcher.

There is one sampler with its history, and the host's own guidance. In the other model's steps the call of the UNet goes
to that model, with its own patches and wrappers. Before a turn the host loads the model whose turn it is, by its own
rules, and unloads the other if memory is short.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....nodes.call_options import merge_options
from ....nodes.interfaces import ModelPatcher
from ....nodes.refusals import SHARED
from ....nodes.sampling import wrappers_of
from ...errors import BadInputError
from ..turns import OWN, Turn
from .matching import check_control, check_pair

_SCHEDULE = "sd-lowvram schedule"
"""The key of the wrappers of a MODEL that shares its steps with another."""
SHARED[_SCHEDULE] = (
    "this MODEL is a schedule of two: put the low VRAM nodes before UNet Schedule, on each of its models"
)

_CLOSE = 1e-4
"""A sigma that is so near to a step's own is that step's: samplers add a little noise, and round."""


def scheduled_model(own: ModelPatcher, small: ModelPatcher, turns: Sequence[Turn]) -> ModelPatcher:
    """A clone of ``own`` that lets ``small`` take some of the steps.

    Raises:
        BadInputError: not UNets that we know, two that do not match, a schedule within a schedule, or deep features
            that one would keep while the other has its turn.
    """
    check_pair(own, small, turns)
    from comfy.patcher_extension import WrappersMP

    clone = own.clone()
    taking = _ModelSwitch(own, small, turns)
    for door, wrapper in (
        (WrappersMP.OUTER_SAMPLE, taking.outer_sample),
        (WrappersMP.PREPARE_SAMPLING, taking.prepare_sampling),
        (WrappersMP.APPLY_MODEL, taking.apply_model),
    ):
        there = clone.wrappers.pop(door, {})
        clone.add_wrapper_with_key(door, _SCHEDULE, wrapper)
        clone.wrappers[door].update(there)  # inside of ours: they are called in turns of their own model only
    around = clone.model_options.get("model_function_wrapper")
    if around is not None:
        clone.model_options["model_function_wrapper"] = taking.restrict_to_turns(around)
    return clone


class _ModelSwitch:
    """The wrappers of one clone: which model's turn it is, and which one the host was asked to load last."""

    def __init__(self, own: ModelPatcher, small: ModelPatcher, turns: Sequence[Turn]) -> None:
        self._own, self._small = own, small
        self._of_step = [name for name, steps in turns for _ in range(steps)]
        self._options: dict[str, Any] = {}
        self._load: dict[bool, Callable[[], Any]] = {}
        self._loaded = True

    def outer_sample(
        self, executor: Any, noise: Tensor, latents: Any, sampler: Any, sigmas: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        steps = len(sigmas) - 1
        if steps != len(self._of_step):
            raise BadInputError(
                f"the steps of the schedule add up to {len(self._of_step)} and the sampler runs {steps}: write as many"
            )
        self._options = {}
        try:
            return self._planned_executor(executor)(noise, latents, sampler, sigmas, *args, **kwargs)
        finally:
            if self._options:
                self._small.cleanup()  # type: ignore[attr-defined]
            self._options, self._load = {}, {}

    def _planned_executor(self, executor: Any) -> Any:
        """``executor`` within what Low VRAM has put around a sampling of the small model."""
        ours = [hooks.outer_sample for hooks in wrappers_of(self._small)]
        if not ours:
            return executor
        from comfy.patcher_extension import WrapperExecutor

        guider = copy.copy(executor.class_obj)
        guider.model_patcher = self._small
        return WrapperExecutor.new_class_executor(executor, guider, ours).execute

    def prepare_sampling(
        self, executor: Any, model: ModelPatcher, shape: Any, conds: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load the model that begins, and what conditioning needs; ``model`` is the sampler's, with what nodes behind
        ours have put on it."""
        self._load = {
            True: functools.partial(executor, model, shape, conds, *args, **kwargs),
            False: functools.partial(self._load_small, shape, conds),
        }
        self._loaded = self._of_step[0] == OWN
        _, conds, models = self._load[self._loaded]()
        return model.model, conds, models

    def _load_small(self, shape: Any, conds: Any) -> Any:
        """Load the small model by the host, with its own wrappers; return the host's result."""
        from comfy import sampler_helpers
        from comfy.model_patcher import create_model_options_clone

        model = self._small
        options = create_model_options_clone(model.model_options)
        sampler_helpers.prepare_model_patcher(model, {}, options)
        loaded = sampler_helpers.prepare_sampling(model, shape, conds, options)
        if not self._options:
            model.pre_run()  # type: ignore[attr-defined]
            self._options = options
        return loaded

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
        transformer = transformer_options or {}
        own = self._is_own(t, transformer)
        if own != self._loaded:
            self._load[own]()
            self._loaded = own
        if own:
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)
        whole, base = executor.class_obj.diffusion_model, self._small.model
        check_control(whole, base.diffusion_model, control)
        options = self._merge_options(transformer, whole, base.diffusion_model)
        call = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control, "transformer_options": options}
        around = self._options.get("model_function_wrapper")
        if around is None:
            return base.apply_model(x, t, **call, **kwargs)
        arguments = {
            "input": x,
            "timestep": t,
            "c": {**call, **kwargs},
            "cond_or_uncond": transformer.get("cond_or_uncond"),
        }
        return around(base.apply_model, arguments)

    def restrict_to_turns(self, around: Callable[..., Any]) -> Callable[..., Any]:
        """Restrict a wrapper of another node around the own model to that model's turns."""

        def call_in_turn(apply: Callable[..., Any], arguments: dict[str, Any]) -> Any:
            if self._is_own(arguments["timestep"], arguments["c"]["transformer_options"]):
                return around(apply, arguments)
            return apply(arguments["input"], arguments["timestep"], **arguments["c"])

        return call_in_turn

    def _is_own(self, sigma: Tensor, options: dict[str, Any]) -> bool:
        if "sample_sigmas" not in options:
            raise BadInputError(
                "this sampler does not pass its sigmas, which a schedule needs: use KSampler or SamplerCustom"
            )
        return self._of_step[_step(sigma, options["sample_sigmas"])] == OWN

    def _merge_options(self, options: dict[str, Any], whole: Any, small: Any) -> dict[str, Any]:
        before = self._own.model_options.get("transformer_options", {})
        shape, other = ((len(unet.input_blocks), len(unet.output_blocks)) for unet in (whole, small))
        return merge_options(options, before, self._options["transformer_options"], shape == other)


def _step(sigma: Tensor, sigmas: Tensor) -> int:
    """The step that a call of the UNet belongs to, by the noise that it is called at."""
    begun = int((sigmas[:-1] >= sigma.max() * (1 - _CLOSE)).sum())
    return max(0, begun - 1)
