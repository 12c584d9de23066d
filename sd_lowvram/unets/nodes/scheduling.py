"""The node that lets two MODELs share one run."""

from __future__ import annotations

from typing import Any

from ....nodes.interfaces import ModelPatcher
from ....nodes.optimising import ALIASES, CATEGORY
from ...errors import BadInputError
from ..turns import Turn, parse_turns
from .turns import scheduled_model

_SMALL = "small"
_DEFAULT = "small:10,full:15"


class LowVRAMUNetSchedule:
    """MODEL and a smaller MODEL, which take the steps of a run in turn."""

    DESCRIPTION = (
        "A smaller model runs some steps of a sampling, the full model the rest. After A-SDM, which begins with the "
        "small model. Draws another picture than either model alone."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "schedule"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("the model for the sampler",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": (
                    "MODEL",
                    {"tooltip": "the full model, called full in the schedule; guidance is taken from it"},
                ),
                _SMALL: ("MODEL", {"tooltip": "a model that was cut from it, called small in the schedule"}),
                "schedule": (
                    "STRING",
                    {
                        "default": _DEFAULT,
                        "tooltip": "the models and their numbers of steps, in order: small:10,full:15. The sum must be "
                        "the number of steps that the sampler runs",
                    },
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, schedule: str | None = None) -> bool | str:
        try:
            if schedule is not None:
                _turns(schedule)
        except BadInputError as error:
            return str(error)
        return True

    def schedule(self, model: ModelPatcher, small: ModelPatcher, schedule: str) -> tuple[ModelPatcher]:
        return (scheduled_model(model, small, _turns(schedule)),)


def _turns(schedule: str) -> tuple[Turn, ...]:
    return parse_turns(schedule, (_SMALL,), "schedule")
