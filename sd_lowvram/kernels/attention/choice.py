"""Choice of the attention backend: the requested one, or the fastest with the promised fidelity."""

from __future__ import annotations

import functools
import warnings

import torch

from ... import doors
from ...errors import SettingsError
from ...settings import Settings
from .backend import AttentionFunction
from .determinism import repeats
from .registry import attend, available_backends, is_present, score_bytes
from .torch_kernels import xformers_why_not

_FASTEST_FIRST = ("sdpa", "fused-softmax", "sliced")  # flash and efficient are what sdpa chooses from


def default_backends(device: torch.device) -> list[str]:
    """Backends to choose from by default, the fastest first: ours, and registered ones with ``before`` set.

    All of them are lossless and run on ``device``."""
    names = list(_FASTEST_FIRST)
    for name, backend in doors.ATTENTION_BACKENDS.items():
        if backend.before in names and backend.fidelity.lossless and available_backends(device)[name] is None:
            names.insert(names.index(backend.before), name)
    return names


def attention(settings: Settings, device: torch.device) -> AttentionFunction:
    """Return the backend that ``settings`` request, as one function ``(q, k, v, mask=None, scale=None, *,
    upcast=False)``.

    Args:
        settings: ``attention``, ``attention_mib`` and ``deterministic`` are read.
        device: device that computes.

    Raises:
        SettingsError: see `choose_backend`.
    """
    return functools.partial(attend, choose_backend(settings, device), score_bytes=score_bytes(settings))


def choose_backend(settings: Settings, device: torch.device) -> str:
    """Return the name of the backend: the requested one, else the fastest; with ``deterministic`` only proved ones.

    If xformers is requested and cannot run, a warning says so and torch's own kernels take its place, as in the
    programs that made it known.

    Args:
        settings: as for :func:`attention`.
        device: device that computes.

    Raises:
        SettingsError: the backend cannot run on ``device``, or has not repeated its bits there; the message names a
            remedy.
    """
    name = settings.attention
    if name == "xformers" and (why := xformers_why_not(device)):
        name = _FASTEST_FIRST[0]
        warnings.warn(f"attention='xformers': {why}. attention={name!r} takes its place", stacklevel=2)
    if name is not None:
        _check_runs(name, device)
    if not settings.deterministic or not is_present(device):
        return name or default_backends(device)[0]
    proved = (backend for backend in ([name] if name else default_backends(device)) if repeats(backend, device))
    chosen = next(proved, None)
    if chosen is None:
        able = ", ".join(backend for backend in default_backends(device) if repeats(backend, device)) or "none"
        raise SettingsError(
            f"attention={name!r} gave other bits when it was run again on {device}, so it cannot be deterministic. "
            f"Backends that repeat their bits here: {able}"
        )
    return chosen


def _check_runs(name: str, device: torch.device) -> None:
    why = available_backends(device)[name]
    if why:
        able = ", ".join(backend for backend, reason in available_backends(device).items() if reason is None)
        raise SettingsError(f"attention={name!r} cannot run on {device}: {why}. What runs here: {able}")
