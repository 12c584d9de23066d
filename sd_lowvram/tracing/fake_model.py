"""A model's twin: the same modules with fake weights, on which settings can be tried and traced at no cost.

The target itself is not touched, whatever is attached to it; the twin is a copy without our hooks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..models import anatomy_of_components
from ..models.anatomy import Anatomy
from ..patches import copied_without
from ..session import Attachment
from ..settings import Settings
from ..streaming.timing import Timing
from ..weights import all_tensors, loaded_dtype
from .fake_tensors import fake_of


def twin(anatomy: Anatomy, mode: FakeTensorMode) -> Anatomy:
    """Copies of the components in which every tensor is a fake one of ``mode``; shared tensors stay shared."""
    components = list(anatomy.components.values())
    memo: dict[int, Any] = {id(tensor): fake_of(_as_loaded(tensor), mode) for tensor in all_tensors(*components)}
    memo |= {id(hooks): OrderedDict() for hooks in _without_hooks(components)}
    finish = copied_without((module for component in components for module in component.modules()), memo)
    copies = {name: copy.deepcopy(component, memo) for name, component in anatomy.components.items()}
    finish()
    made = anatomy_of_components(anatomy.family, copies)
    for path, processor in anatomy.processors.items():
        made.components[made.denoiser or ""].get_submodule(path).processor = processor
    called = {name: getattr(anatomy, name) for name in ("verbs", "computes", "passes", "encodes")}
    return dataclasses.replace(made, **called)


_CONVERTING = ("precision", "weight_storage", "channels_last")
"""Knobs that convert the weights, and wrap the model below all others."""


_OF_ATTENTIONS = ("attention", "attention_mib", "deterministic")


class Fitting:
    """Settings tried on a twin one after the other; what converts its weights stays on for the next trial."""

    def __init__(self, anatomy: Anatomy, device: torch.device) -> None:
        """
        Args:
            anatomy: of the twin.
            device: where the model would compute.
        """
        self._anatomy = anatomy
        self._device = device
        self._parts: dict[str, Anatomy] = {}
        self._converted: dict[str, Attachment] = {}

    @contextlib.contextmanager
    def tried(self, name: str, settings: Settings, timing: Timing | None = None) -> Iterator[None]:
        """Within the block the component ``name`` runs with ``settings``, also one that is no target by itself (a
        ControlNet, a safety checker). Call it within the twin's fake mode."""
        self._convert(name, Settings(**{knob: getattr(settings, knob) for knob in _CONVERTING}))
        part = self._part(name)
        beside = () if part.attentions else _OF_ATTENTIONS  # which another part of the target has
        none = (*_CONVERTING, *beside)
        attachment = Attachment(part, dataclasses.replace(settings, **dict.fromkeys(none)), self._device, timing)
        attachment.apply()
        try:
            yield
        finally:
            attachment.undo()

    def _convert(self, name: str, settings: Settings) -> None:
        converted = self._converted.get(name)
        if converted is not None and converted.settings == settings:
            return
        if converted is not None:
            self._converted.pop(name).undo()
        attachment = Attachment(self._part(name), settings, self._device)
        attachment.apply()
        self._converted[name] = attachment

    def _part(self, name: str) -> Anatomy:
        if name not in self._parts:
            self._parts[name] = anatomy_of_components(self._anatomy.family, {name: self._anatomy.components[name]})
        return self._parts[name]


def _without_hooks(components: list[nn.Module]) -> Iterator[Any]:
    """The dictionaries of hooks that are empty, a dozen a module: copied one by one they take most of the time."""
    for component in components:
        for module in component.modules():
            yield from (value for value in vars(module).values() if type(value) is OrderedDict and not value)


def _as_loaded(tensor: Tensor) -> Tensor:
    """``tensor``, or where a hook has changed its type, one without contents of the type that it had."""
    dtype = loaded_dtype(tensor)
    if dtype == tensor.dtype:
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
