"""Passes of the denoiser traced once by torch.jit.trace, and run from its list of operators without Python.

:mod:`captured_calls` decides when a pass is traced; :mod:`kept_traces` stores it for other processes, which run it from
the first pass on. Under autocast the model runs as it is. Fidelity: ``rounding``, because torch may fuse operators.
Source: diffusers' memory and speed guide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import autocast_dtype
from ...compat.private import followed_by_jit, tree_flatten, tree_unflatten
from ...errors import NoSiteError
from ...models.anatomy import Anatomy
from ...patches import Patch, wrap
from ...settings import Settings
from .captured_calls import Call, CapturedCalls, Replay, kind_of
from .kept_traces import keep, place_of_trace, stored_trace


def traced(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the denoiser's passes by torch.jit.trace's recording of them.

    Args:
        anatomy: its denoiser is traced at the second call of a kind.
        settings: part of the key of stored traces.
        device: device that computes.

    Yields:
        A patch for each entry of the denoiser.

    Raises:
        NoSiteError: the target has no denoiser.
    """
    if anatomy.denoiser is None or anatomy.denoiser_module is None:
        raise NoSiteError("traced: the model has no denoiser to trace")
    passes = _Traced(anatomy.denoiser_module, settings)
    for entry in anatomy.entries[anatomy.denoiser]:
        yield wrap(anatomy.components[anatomy.denoiser], entry, passes.called, "traced")


class _Traced(CapturedCalls):
    knob, done = "traced", "traced"

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        super().__init__(model)
        self._settings = settings

    def takes(self, tensors: list[Tensor]) -> bool:
        return autocast_dtype(tensors[0].device.type) is None and not followed_by_jit()

    def capture(self, call: Call) -> Replay:
        traceable = _OfTensors(self._model, call)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python values become constants; they are equal in one kind
            function = torch.jit.trace(traceable, tuple(call.tensors), check_trace=False)
        if (place := self._place(call)) is not None:
            keep(place, function, self._model, traceable.spec)
        return _replay(function, traceable.spec)

    def kept(self, call: Call) -> Replay | None:
        place = self._place(call)
        trace = None if place is None else stored_trace(place, self._model)
        return None if trace is None else _replay(*trace)

    def _place(self, call: Call) -> Path | None:
        return place_of_trace(self._model, self._settings, kind_of(call, call.tensors[0].device.type))


def _replay(function: Callable[..., Any], spec: Any) -> Replay:
    return lambda tensors: tree_unflatten(list(function(*tensors)), spec)


class _OfTensors(nn.Module):
    """A call as a module that takes and gives tensors only."""

    def __init__(self, unet: nn.Module, call: Call) -> None:
        super().__init__()
        self.unet = unet  # as an attribute, so that its weights are not constants
        self._call = call._replace(leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in call.leaves])
        self._places = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
        self.spec: Any = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [*self._call.leaves]
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        results, self.spec = tree_flatten(self._call.run(leaves))
        return tuple(results)
