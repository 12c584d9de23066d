"""Deep features of the UNet are computed at every few steps, and used again at the steps between.

From one denoising step to the next the small maps deep inside the UNet change little. Between full steps only the
outermost layers run: those down to a branch, and those that take its skip connection back up; what the layers below
gave last is handed to them again. Source of the idea: DeepCache (Ma, Fang and Wang 2023). Fidelity: ``approximate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.private import tree_map
from ..errors import NoSiteError, SettingsError
from ..memory.fake_mode import active_fake_mode
from ..models.anatomy import Anatomy
from ..patches import Patch, wrap
from ..settings import Settings
from ..weights import needs_graph

_MOST_CALLS = 8
"""Largest number of calls of a denoiser at one step, each with its own conditions, that are distinguished."""


def deep_cache(anatomy: Anatomy, settings: Settings, device: torch.device) -> Iterator[Patch]:
    """Run the modules below ``settings.deep_cache_branch`` at every ``settings.deep_cache``-th step only.

    One map is stored for each call of the denoiser at a step, until another component runs.

    Args:
        anatomy: its UNet is patched.
        settings: ``deep_cache`` is the interval in steps, ``deep_cache_branch`` the number of the skip connection.
        device: not read.

    Yields:
        Patches of the modules below the branch, and of the entries of denoiser and autoencoder.

    Raises:
        NoSiteError: the target has no UNet.
        SettingsError: its UNet has no such branch.
    """
    deep = deep_modules(anatomy, settings)
    reuse = _Reuse(anatomy.components[anatomy.denoiser or ""], _number(settings, "deep_cache") or 1)
    for number, module in enumerate(deep):
        around = functools.partial(reuse.around_module, module, number, number == len(deep) - 1)
        yield wrap(module, "forward", around, "deep_cache")
    calls = {anatomy.denoiser: reuse.step, anatomy.autoencoder: reuse.elsewhere}
    for name, component in anatomy.components.items():
        for entry in anatomy.entries[name] if name in calls else ():
            yield wrap(component, entry, calls[name], "deep_cache")


def _number(settings: Settings, name: str) -> int:
    return settings.as_dict()[name] or 0


def skipped_layers(anatomy: Anatomy, settings: Settings, steps: int) -> tuple[frozenset[str], float]:
    """Paths of the modules that do not run at every step, and the share of ``steps`` in which they do not."""
    deep = set(deep_modules(anatomy, settings))
    modules = anatomy.components[anatomy.denoiser or ""].named_modules()
    full = -(-steps // _number(settings, "deep_cache")) / steps
    return frozenset(path for path, module in modules if module in deep), 1 - full


def deep_modules(anatomy: Anatomy, settings: Settings) -> tuple[nn.Module, ...]:
    """The modules that are passed over between full steps, in the order of their calls.

    Args:
        anatomy: of a target with a UNet.
        settings: as for :func:`deep_cache`.

    Raises:
        NoSiteError, SettingsError: as :func:`deep_cache`.
    """
    path, branch = anatomy.unet_path, _number(settings, "deep_cache_branch")
    if path is None:
        raise NoSiteError("deep cache: the model has no UNet")
    most = len(path.makers) - 2
    if branch > most:
        raise SettingsError(f"deep_cache_branch={branch} must be from 0 to {most}: this UNet has no other branch")
    blocks = {site.module for site in anatomy.residual_blocks}
    upwards = [module for module in path.modules if module in blocks][-len(path.makers) :]
    places = {module: place for place, module in enumerate(path.modules)}
    first, last = places[path.makers[branch]], places[upwards[-1 - branch]]
    return path.modules[first + 1 : last]


class _Reuse:
    """Outputs of deep modules at the last full step, by call of the denoiser.

    A new step is recognised by its timestep, which decreases within a run.
    """

    def __init__(self, denoiser: nn.Module, interval: int) -> None:
        self._denoiser = denoiser
        self._interval = interval
        self._steps = 0
        self._timestep: float | None = None
        self._call: tuple[Any, ...] | None = None
        self._calls = 0
        self._full = True
        self._given: dict[tuple[Any, ...], Any] = {}
        self._turns: dict[int, int] = {}

    def step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a call of the denoiser."""
        sample, timestep = _sample_and_timestep(args, kwargs)
        if sample is None or needs_graph(self._denoiser, args, kwargs):  # all layers, or some would lack their input
            return original(*args, **kwargs)
        self._begin(None if active_fake_mode(sample) else timestep)
        self._call = (self._calls, tuple(sample.shape), sample.dtype)
        self._full = self._steps % self._interval == 0 or not any(key[0] == self._call for key in self._given)
        self._turns = {}
        try:
            return original(*args, **kwargs)
        finally:
            self._call = None

    def _begin(self, timestep: Any) -> None:
        now = None if timestep is None else float(torch.as_tensor(timestep).flatten()[0])
        if now is not None and now == self._timestep and self._calls + 1 < _MOST_CALLS:
            self._calls += 1
            return
        falls = now is not None and self._timestep is not None and now < self._timestep
        self._steps, self._calls, self._timestep = self._steps + 1 if falls else 0, 0, now
        if self._steps % self._interval == 0:
            self._given.clear()

    def around_module(
        self, module: nn.Module, number: int, last: bool, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Around a call of a deep module, of which there is more than one where a batch goes part by part."""
        if self._call is None:
            return original(*args, **kwargs)
        turn = self._turns[number] = self._turns.get(number, -1) + 1
        key = self._call, number, turn
        if not self._full:
            return self._given[key]
        result = original(*args, **kwargs)
        self._given[key] = result if last else tree_map(_stand_in, result)
        return result

    def elsewhere(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Free the stored maps before a call of another component."""
        self._given.clear()
        self._timestep = None
        return original(*args, **kwargs)


def _sample_and_timestep(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Any]:
    named = [kwargs[name] for name in ("sample", "x", "timestep", "timesteps") if name in kwargs]
    sample, timestep = (*args, *named, None, None)[:2]
    return (sample if isinstance(sample, Tensor) else None), timestep


def _stand_in(leaf: Any) -> Any:
    """Something of the shape of ``leaf`` that takes no memory: nobody looks at it."""
    return leaf.new_zeros(()).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf
