"""Two MODELs that take turns in one sampling, through the wrappers of the first one's ModelPatcher.

The sampler is one, with its history, and the host's own guidance; where a step is the other model's, the call of the
UNet goes to that one, with its own patches and wrappers. Between two turns the host is asked to load the one whose turn
it is, by its own rules: it makes room at the other's cost where memory is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.unets.turns import OWN, Turn
from .denoiser import wrappers_of
from .interfaces import ModelPatcher
from .refusals import SCHEDULE, denoiser_of

_AS_CALLED = ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas")
"""What the sampler tells a call of the UNet, whichever model it goes to."""
_ALIKE = ("in_channels", "out_channels", "context_dim", "adm_in_channels")
_CLOSE = 1e-4
"""A sigma that is so near to a step's own is that step's: samplers add a little noise, and round."""


def scheduled_model(own: ModelPatcher, small: ModelPatcher, turns: Sequence[Turn]) -> ModelPatcher:
    """A clone of ``own`` that lets ``small`` take some of the steps.

    Raises:
        BadInputError: not UNets that we know, two that do not match, a schedule within a schedule, or deep features
            that one would keep while the other has its turn.
    """
    for model in (own, small):
        denoiser_of(model)
        _check_deep_cache(model, turns)
    _check_match(own, small)
    from comfy.patcher_extension import WrappersMP

    clone = own.clone()
    taking = _Turns(clone, small, turns)
    for door, wrapper in (
        (WrappersMP.OUTER_SAMPLE, taking.outer_sample),
        (WrappersMP.PREPARE_SAMPLING, taking.prepare_sampling),
        (WrappersMP.APPLY_MODEL, taking.apply_model),
    ):
        clone.add_wrapper_with_key(door, SCHEDULE, wrapper)
    return clone


class _Turns:
    """The wrappers of one clone: which model's turn it is, and which one the host was asked to load last."""

    def __init__(self, own: ModelPatcher, small: ModelPatcher, turns: Sequence[Turn]) -> None:
        self._models = {OWN: own, **{name: small for name, _ in turns if name != OWN}}
        self._of_step = [name for name, steps in turns for _ in range(steps)]
        self._options: dict[str, Any] = {}
        self._loaded = OWN

    def outer_sample(
        self, executor: Any, noise: Tensor, latents: Any, sampler: Any, sigmas: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        steps = len(sigmas) - 1
        if steps != len(self._of_step):
            raise BadInputError(
                f"the steps of the schedule add up to {len(self._of_step)} and the sampler runs {steps}: write as many"
            )
        self._loaded, self._options = OWN, {}
        try:
            return executor(noise, latents, sampler, sigmas, *args, **kwargs)
        finally:
            if self._options:
                self._small.cleanup()  # type: ignore[attr-defined]
            self._options = {}

    def prepare_sampling(
        self, executor: Any, model: ModelPatcher, shape: Any, conds: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load the model that begins, and what conditioning needs."""
        if self._of_step[0] == OWN:
            return executor(model, shape, conds, *args, **kwargs)
        _, conds, others = self._load(self._of_step[0], shape, conds)
        return model.model, conds, others

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
        told = transformer_options or {}
        name = self._of_step[_step(t, told["sample_sigmas"])]
        if name != self._loaded:
            self._load(name, (max(1, len(x) // 2), *x.shape[1:]), {})
        if name == OWN:
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)
        self._check_control(control)
        options = dict(self._options["transformer_options"])
        options |= {key: told[key] for key in _AS_CALLED if key in told}
        call = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control, "transformer_options": options}
        around = self._options.get("model_function_wrapper")
        apply = self._small.model.apply_model
        if around is None:
            return apply(x, t, **call, **kwargs)
        given = {"input": x, "timestep": t, "c": {**call, **kwargs}, "cond_or_uncond": told.get("cond_or_uncond")}
        return around(apply, given)

    @property
    def _small(self) -> ModelPatcher:
        return next(model for name, model in self._models.items() if name != OWN)

    def _load(self, name: str, shape: Any, conds: Any) -> Any:
        """Have the host load a model, as it does before a sampling; what it says of it."""
        from comfy import sampler_helpers
        from comfy.model_patcher import create_model_options_clone
        from comfy.patcher_extension import WrappersMP

        model = self._models[name]
        options = create_model_options_clone(model.model_options)  # type: ignore[attr-defined]
        sampler_helpers.prepare_model_patcher(model, {}, options)
        wrappers = options["transformer_options"].setdefault("wrappers", {})
        around = wrappers.get(WrappersMP.PREPARE_SAMPLING, {})
        wrappers[WrappersMP.PREPARE_SAMPLING] = {key: some for key, some in around.items() if key != SCHEDULE}
        loaded = sampler_helpers.prepare_sampling(model, shape, conds, options)
        if name != OWN and not self._options:
            model.pre_run()  # type: ignore[attr-defined]
            self._options = options
        self._loaded = name
        return loaded

    def _check_control(self, control: Any) -> None:
        if control is None:
            return
        own, small = (len(model.model.diffusion_model.input_blocks) for model in (self._models[OWN], self._small))
        if own != small:
            raise BadInputError(
                f"a ControlNet gives maps for the {own} input blocks of the whole UNet, and the smaller one of the "
                f"schedule has {small}: let it act in steps of the whole one only, by its start and end"
            )


def _step(sigma: Tensor, sigmas: Tensor) -> int:
    """The step that a call of the UNet belongs to, by the noise that it is called at."""
    begun = int((sigmas[:-1] >= sigma.max() * (1 - _CLOSE)).sum())
    return max(0, begun - 1)


def _check_match(own: ModelPatcher, small: ModelPatcher) -> None:
    one, other = (model.model.model_config.unet_config for model in (own, small))
    apart = [name for name in _ALIKE if one.get(name) != other.get(name)]
    if apart:
        told = ", ".join(f"{name} is {one.get(name)} in one and {other.get(name)} in the other" for name in apart)
        raise BadInputError(f"the two models do not match, {told}: take a model and one that was cut from it")


def _check_deep_cache(model: ModelPatcher, turns: Sequence[Turn]) -> None:
    """Deep features that are used again between steps belong to the steps before them: a turn must not come again."""
    names = [name for name, _ in turns]
    again = len({*names}) < len(names)
    if again and any(wrapper.settings.deep_cache is not None for wrapper in wrappers_of(model)):
        raise BadInputError(
            "deep_cache and a schedule in which a model has more than one turn exclude each other: its features are "
            "those of many steps before; set deep_cache to 0 in Optimize Model, or give each model one turn"
        )
