"""Parts of training a denoiser that diffusers lacks: noise levels spread over a batch, their weights, and a learning
rate that depends on the step's number alone, so that a resumed run needs no state of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LEVELS = 1000


def rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to 2 % of ``peak``.

    Args:
        step: number of the step, from 0.
        steps: all steps.
        peak: largest rate.
        warmup: steps of the warm-up.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (steps - warmup)))))


def noise_levels(count: int, generator: torch.Generator) -> Tensor:
    """Timesteps spread evenly over a batch, the least noisy first."""
    spread = (torch.arange(count) + torch.rand(count, generator=generator)) * (LEVELS / count)
    return spread.long().clamp(max=LEVELS - 1)


def min_snr_weights(schedule: Any, levels: Tensor, gamma: float = 5.0) -> Tensor:
    """Return weights (N,) of the squared error, after Hang et al. 2023.

    Args:
        schedule: a scheduler of diffusers.
        levels: (N,) timesteps.
        gamma: largest signal-to-noise ratio that counts.
    """
    from diffusers.training_utils import compute_snr

    snr: Tensor = compute_snr(schedule, levels)
    return snr.clamp(max=gamma) / (snr if schedule.config.prediction_type == "epsilon" else snr + 1)
