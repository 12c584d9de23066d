"""Registration of settings that give another picture: their knobs, and the choice ``vae_tiles="fast"``."""

from __future__ import annotations

import importlib
from typing import Any

from ..doors import register
from ..knob import ANY, Act, Choice, Depth, Fidelity, Knob

_APPROXIMATE, _DENOISE = Fidelity.APPROXIMATE, ("denoise",)


class _Hook:
    """The hook of a module's name, imported when it is needed: the command line reads the knobs without torch."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *given: Any) -> Any:
        return getattr(self._module(), self.__name__)(*given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module(), name)

    def _module(self) -> Any:
        return importlib.import_module(f".{self.__name__}", __package__)


KNOBS = {
    "deep_cache": Knob(
        place=22,
        label="Reuse deep features every N steps",
        help="compute the model's deep layers only every N steps and reuse their results in between; more is faster "
        "and farther from the original picture",
        when="samplers with many steps; another picture, and memory for the stored results",
        minimum=2,
        maximum=100,
        fidelity=_APPROXIMATE,
        stages=_DENOISE,
        hook=_Hook("deep_cache"),
        depth=Depth.SKIPS,
        acts={Act.SKIPS_LAYERS: ANY, Act.KEEPS_STATE: ANY},
        excludes={Act.STREAMS_WEIGHTS: ANY},
    ),
    "deep_cache_branch": Knob(
        place=23,
        label="Outer layers in every step",
        help="number of outer layers that run in every step while deep features are reused; more is slower and closer "
        "to the original picture",
        when="with deep_cache; more is closer and slower",
        minimum=0,
        maximum=100,
        fidelity=_APPROXIMATE,
        stages=_DENOISE,
    ),
    "merge_tokens": Knob(
        place=24,
        label="Merge similar parts, up to",
        help="compute similar parts of the picture together in self-attention, up to this share of it; more is faster "
        "and farther from the original picture",
        when="large pictures, if self-attention takes most of the time; another picture",
        maximum=75,
        unit="%",
        fidelity=_APPROXIMATE,
        stages=_DENOISE,
        hook=_Hook("merge_tokens"),
        depth=Depth.COMPUTES,
        acts={Act.ACTS_IN_BLOCKS: ANY, Act.KEEPS_STATE: ANY},
    ),
}

_FAST = Choice(
    _APPROXIMATE,
    _Hook("vae_fast"),
    help="overlapping tiles, blended, which may show",
    when="takes less, changes tones and leaves seams",
)

register(knobs=KNOBS, choices={"vae_tiles=fast": _FAST})
