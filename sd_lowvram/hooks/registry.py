"""Hooks that the settings request.

A hook is a function ``(anatomy, settings, device)`` that yields patches and changes, and changes nothing itself. It is
in the file of its name, in one of the packages here. A knob names this file ("pieces.vae_slices") and the depth of the
hook: nothing is registered here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..devices.support import check_streaming, support_of
from ..errors import NoSiteError, SettingsError
from ..knob import Act
from ..models.anatomy import Anatomy
from ..models.calls import CONTROL_STAGE, TEXT_STAGE
from ..patches import Change, Patch
from ..settings import STREAMED, Knob, Preset, Settings, conflict, knobs
from ..streaming.timing import StepTiming
from .offers import Offer, OfferKind, Target

Hook = Callable[[Anatomy, Settings, torch.device], Iterable[Patch | Change]]


def active_hooks(settings: Settings, timing: StepTiming | None = None) -> list[Hook]:
    """Hooks that ``settings`` request, in the order in which they wrap the model: the last is the outermost.

    Args:
        settings: decided knobs select the hooks.
        timing: how long a step's modules take, where a plan knows it: weights are then streamed by schedule.

    Returns:
        Functions ``(anatomy, settings, device) -> patches``.
    """
    asked = sorted(
        ((knob.depth, knob.hook_of(value)) for _, knob, value in settings.decided()), key=lambda choice: choice[0]
    )
    hooks = [_hook(name) for name in dict.fromkeys(name for _, name in asked) if name]
    return [functools.partial(hook, timing=timing) if hook.__name__ == "offload" else hook for hook in hooks]


def applicable(settings: Settings, anatomy: Anatomy, device: torch.device) -> Settings:
    """Return ``settings`` as they are; of a preset, only the knobs that find something to act on.

    Args:
        settings: as requested.
        anatomy: of the target.
        device: device that computes.

    Raises:
        NoSiteError: ``settings`` request streamed weights, and they cannot be streamed to ``device``.
        SettingsError: two of the knobs exclude each other.
    """
    if isinstance(settings, Preset):
        acting = (choice for choice in settings.decided() if _acts(*choice[1:], anatomy, settings, device))
        settings = Settings(**{name: value for name, _, value in acting})
    elif settings.offload in STREAMED:
        check_streaming(device, settings.offload)
    if (why := conflict(settings)) is not None:
        raise SettingsError(why)
    return settings


def _acts(knob: Knob, value: Any, anatomy: Anatomy, settings: Settings, device: torch.device) -> bool:
    """True if the target has one of the knob's stages, and a site for its hook."""
    if knob.hook == "parking.offload":
        return value not in STREAMED or support_of(device).streams
    if not knob.stages:
        return True
    names = anatomy.components
    stages = {CONTROL_STAGE} if any(name.startswith("controlnet") for name in names) else set()
    stages |= {TEXT_STAGE} if any(name.startswith("text_encoder") for name in names) else set()
    stages |= {"denoise"} if anatomy.denoiser else set()
    stages |= {"decode", "encode"} if anatomy.autoencoder else set()
    if stages.isdisjoint(knob.stages):
        return False
    hook = knob.hook_of(value)
    if hook == "parking.offload":
        return True  # the decoder's place: the hook itself looks at weights, which a plan need not have
    try:
        return not hook or all(True for _ in _hook(hook)(anatomy, settings, device))
    except NoSiteError:
        return False


def list_offers(target: Target) -> list[Offer]:
    """Offers of all hooks for ``target``, the deepest first."""
    offers: list[Offer] = []
    asked: set[Any] = set()
    for knob in sorted(knobs().values(), key=lambda knob: knob.depth):
        for name in knob.hook.values() if isinstance(knob.hook, Mapping) else (knob.hook,):
            home = _home(name)
            if home and home not in asked and hasattr(home, "offers"):
                offers += home.offers(target)
            asked.add(home)
    if target.anatomy.family.known:
        return offers
    rehearsed = target.anatomy.rehearsal is not None
    return [offer for offer in offers if _is_about_weights(offer) or (rehearsed and _is_about_layers(offer))]


def checked(settings: Settings, anatomy: Anatomy, device: torch.device) -> Settings:
    """``settings`` as the requested hooks accept them on ``device``.

    A hook's file may have a function ``checked(anatomy, settings, device)`` for this.

    Args:
        settings: as requested.
        anatomy: of the target.
        device: device that computes.

    Raises:
        SettingsError: a hook does not support its value.
    """
    for home in {_home(knob.hook_of(value)): None for _, knob, value in settings.decided()}:
        if hasattr(home, "checked"):
            settings = home.checked(anatomy, settings, device)
    return settings


def skipped_layers(anatomy: Anatomy, settings: Settings, steps: int) -> tuple[frozenset[str], float]:
    """Paths of the denoiser's modules that do not run at every step, and the share of ``steps`` in which they do not.

    The hook of a knob that skips layers has this function, too.

    Args:
        anatomy: of the target.
        settings: decided knobs.
        steps: of the run.
    """
    for _, knob, value in settings.decided():
        if Act.SKIPS_LAYERS in knob.acts_of(value):
            found: tuple[frozenset[str], float] = _home(knob.hook_of(value)).skipped_layers(anatomy, settings, steps)
            return found
    return frozenset(), 0.0


def _is_about_weights(offer: Offer) -> bool:
    """True if the offer places weights, or is about an autoencoder: the only offers for an unknown model."""
    return offer.kind is OfferKind.WEIGHTS or (bool(offer.stages) and {"encode", "decode"}.issuperset(offer.stages))


def _is_about_layers(offer: Offer) -> bool:
    """True if the offer is about feed-forward layers, which are found in models of unknown families too."""
    return "feed_forward_chunks" in offer.knobs


def _home(name: str | Hook) -> Any:
    """Place of a hook's further functions: its file, or the function itself of a registered knob; "" for none."""
    return name if callable(name) else name and importlib.import_module(f".{name}", __package__)


def _hook(name: str | Hook) -> Any:
    return name if callable(name) else getattr(_home(name), name.rpartition(".")[2])
