"""Placement of weights: all on the device, a component at a time, or streamed during compute.

Source: basujindal's split model; diffusers' model, group and sequential offload. Fidelity: ``bitwise``; streamed layers
that are split by output rows ``rounding``.

Inputs are moved to the component's device and its outputs back to the inputs' device, so that a pipeline whose weights
are in host memory is called as before. On a CPU-only machine the weights really are copied between
the device's account and the host's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from ...devices.support import support_of
from ...errors import NoSiteError, SettingsError
from ...models.anatomy import Anatomy
from ...models.support import check_moved
from ...patches import Change, Patch, wrap
from ...settings import Settings
from ...streaming.device_io import run_at
from ...streaming.engine import ActiveStreams, Stream
from ...streaming.layout import ResidencyPolicy
from ...streaming.timing import StepTiming
from ...units import MIB
from ...weights import all_tensors
from ..offers import Offer, OfferKind, Target
from ..pieces.vae_exact import divides
from ..replay.streamed_graphs import check_recordable, record_stream
from .placement import convert_in_one_buffer, place, run_on_cpu, widen_on_host


def offload(
    anatomy: Anatomy, settings: Settings, device: torch.device, timing: StepTiming | None = None
) -> Iterator[Patch | Change]:
    """Place the weights as ``settings.offload`` and ``settings.decoder_device`` say.

    Args:
        anatomy: all its components are moved.
        settings: ``offload`` with ``weights_mib``, ``split_layers`` and ``streamed_graphs``, and ``decoder_device``.
        device: device that computes.
        timing: how long the denoiser's modules take; None: as many bytes as possible stay.

    Yields:
        Patches of every layer whose weights are streamed, and changes that move the rest.

    Raises:
        ConflictError: somebody else moves the weights already, or weights that cannot be streamed.
        NoSiteError: the target has no component whose weights could wait, no decoder for the CPU, or streamed steps are
            to be recorded and there are none.
    """
    components = dict(anatomy.components)
    check_moved(components)
    decoder_on_cpu = settings.decoder_device == "cpu"
    if decoder_on_cpu:
        if anatomy.autoencoder is None:
            raise NoSiteError("decoder device: the target has no autoencoder")
        vae = components.pop(anatomy.autoencoder)
        yield Change(functools.partial(widen_on_host, [vae]), hook="decoder_device")
        yield from _entries(anatomy, anatomy.autoencoder, run_on_cpu, "decoder_device")
    if settings.offload in (None, "none"):
        if settings.streamed_graphs:
            raise NoSiteError("streamed_graphs: no weights are streamed")
        yield Change(functools.partial(place, list(components.values()), device), hook="offload")
        if anatomy.autoencoder in components and device.type == "cuda":
            vae = components[anatomy.autoencoder]
            converted = functools.partial(convert_in_one_buffer, vae, device)
            yield wrap(vae, "to", converted, "offload")  # SDXL's pipelines widen it for a decode
        if decoder_on_cpu:
            for name in components:
                yield from _entries(anatomy, name, functools.partial(run_at, device), "offload")
    else:
        yield from _stream(anatomy, components, settings, device, timing)


def offers(target: Target) -> Iterator[Offer]:
    """Offer every way to place the weights that the device supports, and the decoder on the CPU next to a GPU.

    Single layers are offered whole and split: split ones need a smaller buffer, which leaves memory for a faster step.
    """
    anatomy = target.anatomy
    streams = support_of(target.device).streams
    yield Offer(OfferKind.WEIGHTS, {"offload": "none"})
    yield Offer(OfferKind.WEIGHTS, {"offload": "component"}, least=not streams)
    if streams:
        if anatomy.denoiser is not None:
            yield Offer(OfferKind.WEIGHTS, {"offload": "blocks"}, mib_knob="weights_mib")
            yield Offer(OfferKind.WEIGHTS, {"offload": "halves"})
        yield Offer(OfferKind.WEIGHTS, {"offload": "layer"}, least=True)
        yield Offer(OfferKind.WEIGHTS, {"offload": "layer", "split_layers": True}, least=True)
    if target.on_gpu and anatomy.vae is not None and target.fixed.decoder_device in (None, "cpu"):
        away = {"vae_tiles": "off", "decoder_device": "cpu"}
        yield Offer(OfferKind.INSTEAD, away, level=2 if divides(anatomy.vae) else 1, stages=("encode", "decode"))


def checked(anatomy: Anatomy, settings: Settings, device: torch.device) -> Settings:
    """Return ``settings`` if a plan knows the memory of all that they request.

    Args:
        anatomy, device: not read.
        settings: as requested.

    Raises:
        SettingsError: they request recordings of streamed steps.
    """
    if settings.streamed_graphs:
        raise SettingsError(
            "streamed_graphs: no plan knows the memory of recorded steps yet: leave them out, or attach the settings "
            "without a plan"
        )
    return settings


def _entries(anatomy: Anatomy, name: str, around: Callable[..., Any], hook: str) -> Iterator[Patch]:
    yield from (wrap(anatomy.components[name], entry, around, hook) for entry in anatomy.entries[name])


def _stream(
    anatomy: Anatomy,
    components: dict[str, nn.Module],
    settings: Settings,
    device: torch.device,
    timing: StepTiming | None,
) -> Iterator[Patch | Change]:
    if settings.streamed_graphs:
        check_recordable(anatomy, device)
    for name, component in components.items():
        if not all_tensors(component):
            raise NoSiteError(f"offload: {name} holds no weights")
    turns = ActiveStreams()
    alone = settings.offload == "component"
    groups = [{name: part} for name, part in components.items()] if alone else step_groups(anatomy, components)
    for group in groups:
        denoises = any(name in group for names in anatomy.steps for name in names)
        own = timing.select(group) if timing is not None and len(anatomy.steps) > 1 else timing
        stream = Stream(group, device, policy_of(settings, denoises, own), turns, repeats=denoises)
        yield Change(stream.offload, hook="offload")
        yield from stream.patches()
        for name in group:
            yield from _entries(anatomy, name, stream.run, "offload")
        if settings.streamed_graphs and anatomy.denoiser in group:
            yield from record_stream(anatomy, stream)


def step_groups(anatomy: Anatomy, components: Mapping[str, nn.Module]) -> list[dict[str, nn.Module]]:
    """Groups of models that share a device buffer: those that run in every step together, each other one by itself.

    Args:
        anatomy: of the target.
        components: those of its models to group, by name.
    """
    groups = ([name for name in group if name in components] for group in anatomy.steps)
    steps = [{name: components[name] for name in group} for group in groups if group]
    return [*steps, *({name: part} for name, part in components.items() if not any(name in group for group in steps))]


def policy_of(settings: Settings, denoises: bool, timing: StepTiming | None = None) -> ResidencyPolicy:
    """Policy for the weights of a group; the denoiser's group runs step after step.

    Args:
        settings: ``offload``, ``weights_mib`` and ``split_layers`` are read.
        denoises: True for the denoiser's group.
        timing: times of a step's modules; None: as many bytes as possible stay.
    """
    if settings.offload == "component":
        return ResidencyPolicy("whole")
    buffer_bytes = settings.weights_mib * MIB if settings.weights_mib is not None else None
    split = bool(settings.split_layers)
    if settings.offload == "halves":
        return ResidencyPolicy("halves", buffer_bytes, split, timing) if denoises else ResidencyPolicy("whole")
    kind: Literal["blocks", "layer"] = "blocks" if settings.offload == "blocks" else "layer"
    in_pieces = settings.guidance_in_turn or settings.residual_strips or settings.transformer_chunks
    timing = timing if denoises else None
    return ResidencyPolicy(kind, buffer_bytes, split, timing, grows=not denoises, together=bool(denoises and in_pieces))


def single_layers(settings: Settings) -> ResidencyPolicy:
    """Policy that streams one layer at a time, in parts if ``settings.split_layers`` says so."""
    return ResidencyPolicy("layer", split=bool(settings.split_layers))


def trim_buffer(settings: Settings, needed: Callable[[], int]) -> Settings:
    """``settings`` with a buffer of at most ``needed()`` bytes for blocks: a larger one gives the same run."""
    if settings.weights_mib is None or settings.offload != "blocks":
        return settings
    return dataclasses.replace(settings, weights_mib=min(settings.weights_mib, -(-needed() // MIB)))
