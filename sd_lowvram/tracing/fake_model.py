"""A model's fake copy: the same modules with fake weights, on which settings can be tried and traced at no cost.

The target itself is not touched, whatever is attached to it; the copy is one without our hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import FakeTensorMode
from ..hooks.numbers.channels_last import has_sites
from ..memory.accounts import unmark_host
from ..memory.threads import pause_models
from ..models import add_rehearsal, anatomy_of_components
from ..models.anatomy import HOST, Anatomy
from ..session import Attachment
from ..settings import Settings
from ..streaming.layers import Layer, layers_of
from ..streaming.timing import StepTiming
from ..weight_parts import is_wrapper, registered
from ..weights import all_tensors, loaded_dtype
from .copies import copies_of
from .equal_calls import equal_modules
from .fake_tensors import fake_of, fakes_of


def fake_copy(anatomy: Anatomy, mode: FakeTensorMode) -> Anatomy:
    """Copy the components of ``anatomy`` with fake weights.

    Args:
        anatomy: parts of the target; it is not changed.
        mode: makes the fake tensors.

    Returns:
        The copies, with their own sites. Weights that modules share stay shared.
    """
    fakes = fakes_of(anatomy.components.values(), lambda tensor: fake_of(undo_cast(tensor), mode))
    copies = copies_of(anatomy.components, fakes, anatomy.family.left_out)
    copied = anatomy_of_components(anatomy.family, copies)
    for path, processor in anatomy.processors.items():
        copied.components[copied.denoiser or ""].get_submodule(path).processor = processor
    called = ("computes", "passes", "calls", "joined", "encodes")
    copied = dataclasses.replace(copied, **{name: getattr(anatomy, name) for name in called})
    return add_rehearsal(copied, anatomy.rehearsal)


def fingerprint(component: nn.Module, host: Mapping[str, Any] | None = None) -> str:
    """Return a key of a component's fake copy: classes, shapes and types, not the weights' values.

    Args:
        component: the model.
        host: facts on the host whose code it runs; None: diffusers.
    """
    parts: list[Any] = [type(module).__qualname__ for module in component.modules()]
    parts += [
        (tuple(tensor.shape), str(loaded_dtype(tensor)), tensor.stride(), str(getattr(tensor, "quant_type", "")))
        for tensor in all_tensors(component)
    ]
    quantised = (tensor for _, _, tensor in registered(*component.modules()) if is_wrapper(tensor))
    parts += [(type(tensor).__qualname__, repr(tensor.__tensor_flatten__())) for tensor in quantised]  # type: ignore[attr-defined]
    config = getattr(component, "config", None)
    if isinstance(config, Mapping):  # "_use_default_values" has no fixed order
        config = sorted((name, repr(value)) for name, value in config.items() if not name.startswith("_"))
    parts.append(repr(config))
    if host is not None:
        parts.append(repr(host))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_CONVERTING = ("precision", "weight_storage", "channels_last")
"""Knobs that convert the weights; their hooks are the innermost."""

_OF_ATTENTIONS = ("attention", "attention_mib", "deterministic")


class FakeModel:
    """A model's fake copy, on which settings are tried one after the other.

    Conversions of its weights stay in place for the next trial with the same ones.
    """

    def __init__(self, anatomy: Anatomy, device: torch.device) -> None:
        """
        Args:
            anatomy: of the model, which is copied when it is first needed.
            device: where the model would compute.
        """
        self._model = anatomy
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.cache_enabled = False  # op_cache takes its place, with cheaper keys
        self._copy: Anatomy | None = None
        self._parts: dict[str, Anatomy] = {}
        self._converted: dict[str, Attachment] = {}
        self._layers: dict[Any, list[Layer]] = {}
        self._equals: dict[str, dict[nn.Module, int]] = {}
        self._fingerprints: dict[str, str] = {}
        self._has_sites: dict[str, bool] = {}

    @property
    def anatomy(self) -> Anatomy:
        """The copy, made at first use."""
        if self._copy is None:
            with pause_models(self._model.components.values()):
                self._copy = fake_copy(self._model, self._mode)
        return self._copy

    def fingerprint(self, name: str) -> str:
        """Key of a component's copy, without copying."""
        if name not in self._fingerprints:
            with pause_models([self._model.components[name]]):
                self._fingerprints[name] = fingerprint(self._model.components[name], self._model.configs.get(HOST))
        return self._fingerprints[name]

    @contextlib.contextmanager
    def running(self, name: str, settings: Settings, timing: StepTiming | None = None) -> Iterator[None]:
        """Attach ``settings`` to the component ``name`` within the block, which is in the fake mode.

        The component need not be a target by itself (a ControlNet, a safety checker).

        Args:
            name: name of the component.
            settings: knobs to attach.
            timing: timing by which streamed weights are scheduled.
        """
        part = self._part(name)
        beside = () if part.attentions else _OF_ATTENTIONS  # the attentions are in another component
        others = dataclasses.replace(settings, **dict.fromkeys((*_CONVERTING, *beside)))
        converting = {knob: getattr(settings, knob) for knob in _CONVERTING}
        if name not in self._has_sites:
            self._has_sites[name] = has_sites(part.components[name])
        if not self._has_sites[name]:  # in a transformer's pipeline only the autoencoder has sites
            converting["channels_last"] = None
        attachment = Attachment(part, others, self._device, timing)
        with self._mode:
            self._convert(name, Settings(**converting))
            attachment.apply()
            try:
                yield
            finally:
                if settings.offload is not None:
                    for tensor in all_tensors(part.components[name]):
                        unmark_host(tensor)
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
            part = anatomy_of_components(self.anatomy.family, {name: self.anatomy.components[name]})
            self._parts[name] = add_rehearsal(part, self.anatomy.rehearsal)
        return self._parts[name]

    def layers(self, components: Mapping[str, nn.Module], settings: Settings) -> list[Layer]:
        """The layers of components that run with ``settings``."""
        key = *components, settings.precision, settings.weight_storage
        if key not in self._layers:
            self._layers[key] = layers_of(components)
        return self._layers[key]

    def equals(self, name: str) -> dict[nn.Module, int]:
        """The modules of a component that equal another one of it, each with a number for its kind."""
        if name not in self._equals:
            self._equals[name] = equal_modules(self.anatomy.components[name])
        return self._equals[name]


def undo_cast(tensor: Tensor) -> Tensor:
    """``tensor``, or where a hook has changed its type, one without contents of the type that it had."""
    dtype = loaded_dtype(tensor)
    if dtype == tensor.dtype:
        return tensor
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return nn.Parameter(meta, requires_grad=False) if isinstance(tensor, nn.Parameter) else meta
