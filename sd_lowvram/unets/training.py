"""What training a denoiser takes, whatever its loss: noise levels, their weights, a rate and an average of weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LEVELS = 1000


class Average:
    """Exponential moving average of a module's parameters and buffers.

    Attributes:
        shadow: name -> average.
        steps: how many updates it has seen; the first ones forget faster.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay, self.steps = module, decay, 0
        self.shadow = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, value in self.module.state_dict().items():
            self.shadow[name].lerp_(value, 1 - decay)


def rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """The learning rate: linear warm-up, then half a cosine down to 2 % of ``peak``."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (steps - warmup)))))


def noise_levels(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Timesteps spread evenly over a batch, the least noisy first."""
    spread = (torch.arange(count) + torch.rand(count, generator=generator)) * (LEVELS / count)
    return spread.long().clamp(max=LEVELS - 1)


def min_snr_weights(alphas: Tensor, prediction: str, gamma: float = 5.0) -> Tensor:
    """Weights of the squared error at levels of ``alphas`` (products of the schedule), after Hang et al. 2023.

    Args:
        prediction: "epsilon" or "v_prediction".
    """
    snr = alphas / (1 - alphas)
    return snr.clamp(max=gamma) / (snr if prediction == "epsilon" else snr + 1)
