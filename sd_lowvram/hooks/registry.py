"""Which hooks the settings ask for.

A hook is a function ``(anatomy, settings, device)`` that yields patches and changes and acts on nothing itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from ..models.anatomy import Anatomy
from ..patches import Change, Patch
from ..settings import Settings
from ..streaming.timing import Timing
from .attention import attention
from .channels_last import channels_last
from .feed_forward import feed_forward
from .guidance_in_turn import guidance_in_turn
from .inference_mode import inference_mode
from .offload import offload
from .precision import precision
from .residual_strips import residual_strips
from .skip_parking import skip_parking
from .transformer_chunks import transformer_chunks
from .vae_exact import vae_exact
from .vae_fast import vae_fast
from .vae_slices import vae_slices
from .weight_storage import weight_storage

Hook = Callable[[Anatomy, Settings, torch.device], Iterable[Patch | Change]]


def active_hooks(settings: Settings, timing: Timing | None = None) -> list[Hook]:
    """The hooks that ``settings`` ask for, in the order in which they wrap the model: the last is the outermost.

    Args:
        timing: how long a step's modules take, where a plan knows it: weights are then streamed by schedule.
    """
    chosen: list[tuple[Hook, bool]] = [
        (precision, settings.precision is not None),
        (channels_last, bool(settings.channels_last)),
        (weight_storage, settings.weight_storage is not None),
        (attention, settings.attention is not None or bool(settings.deterministic)),
        (vae_exact, settings.vae_tiles == "exact"),
        (vae_fast, settings.vae_tiles == "fast"),
        (vae_slices, bool(settings.vae_slices)),
        (functools.partial(offload, timing=timing), settings.offload is not None or settings.decoder_device == "cpu"),
        (feed_forward, settings.feed_forward_chunks is not None),
        (residual_strips, settings.residual_strips is not None),
        (transformer_chunks, settings.transformer_chunks is not None),
        (skip_parking, bool(settings.park_skips)),
        (guidance_in_turn, bool(settings.guidance_in_turn)),
        (inference_mode, bool(settings.inference_mode)),
    ]
    return [hook for hook, wanted in chosen if wanted]
