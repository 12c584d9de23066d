"""Check that two MODELs can alternate in one sampling; a sentence if they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....nodes.interfaces import ModelPatcher
from ....nodes.refusals import denoiser_of
from ....nodes.sampling import wrappers_of
from ...errors import BadInputError
from ...knob import Act
from ...settings import acts
from ..turns import Turn

_ALIKE = ("in_channels", "out_channels", "context_dim", "adm_in_channels")


def check_pair(own: ModelPatcher, small: ModelPatcher, turns: Sequence[Turn]) -> None:
    """Raise BadInputError unless the two are UNets that we know, one fits in the other's place, and neither keeps deep
    features while the other has its turn."""
    for model in (own, small):
        if denoiser_of(model) is None:
            kind = type(model.model).__name__
            raise BadInputError(
                f"{kind} has no UNet that is known here: UNet Schedule takes those of SD1.x, SD2.x, SDXL"
            )
        _check_deep_cache(model, turns)
    ours, other = _model_facts(own), _model_facts(small)
    apart = [name for name in ours if ours[name] != other[name]]
    if apart:
        differences = ", ".join(f"{name} is {ours[name]} in one and {other[name]} in the other" for name in apart)
        raise BadInputError(f"the two models do not match, {differences}: take a model and one that was cut from it")


def check_control(own: Any, small: Any, control: Any) -> None:
    """Raise BadInputError where the maps of a ControlNet for ``own`` come to a UNet ``small`` of fewer blocks."""
    if control is None:
        return
    theirs, has = len(own.input_blocks), len(small.input_blocks)
    if theirs != has:
        raise BadInputError(
            f"a ControlNet gives maps for the {theirs} input blocks of the whole UNet, and the smaller one of the "
            f"schedule has {has}: let it act in steps of the whole one only, by its start and end"
        )


def _model_facts(model: ModelPatcher) -> dict[str, Any]:
    """Facts that must be equal in both models, including a node's change of the prediction."""
    config = model.model.model_config.unet_config
    bases = [base.__name__ for base in type(model.get_model_object("model_sampling")).__mro__]
    prediction = next((base for base in bases if base in _PREDICTIONS), "unknown")
    return {**{name: config.get(name) for name in _ALIKE}, "prediction": prediction}


_PREDICTIONS = ("V_PREDICTION", "X0", "EDM", "EPS")
"""The host's names; the first that is among a sampling's bases, as they follow one another, is its own."""


def _check_deep_cache(model: ModelPatcher, turns: Sequence[Turn]) -> None:
    """Deep features that are used again between steps belong to the steps before them: a turn must not come again."""
    names = [name for name, _ in turns]
    again = len({*names}) < len(names)
    if again and any(Act.SKIPS_LAYERS in acts(wrapper.settings) for wrapper in wrappers_of(model)):
        raise BadInputError(
            "deep_cache cannot go with a schedule in which a model has more than one turn: its features would be those "
            "of many steps before; set deep_cache to 0 in Low VRAM Settings, or give each model one turn"
        )
