"""Gradients of small models with any knob, held against those of the plain model, or against what was computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tiny
import torch
from torch import Tensor

from sd_lowvram import Settings
from sd_lowvram.settings import Fidelity, knobs

BESIDE: dict[str, dict[str, Any]] = {
    "attention_mib": {"attention": "sliced"},
    "vae_map": {"vae_tiles": "exact"},
    "vae_strip_mib": {"vae_tiles": "exact"},
    "weights_mib": {"offload": "blocks"},
    "split_layers": {"offload": "layer"},
    "deep_cache_branch": {"deep_cache": 3},
}
"""What has to be set for a knob to act; a knob that is not named acts by itself."""
MANY = {
    "merge_tokens": 50,
    "deep_cache": 3,
    "deep_cache_branch": 0,
    "attention_mib": 1,
    "vae_strip_mib": 1,
    "weights_mib": 2,
}
"""Values of numbers, where 4 is not what acts on so small a model."""
OFTEN = [
    Settings(offload=offload, **more)
    for offload in ("layer", "blocks", "halves", "component")
    for more in ({"precision": "fp16-storage"}, {"weight_storage": "int8"}, {"guidance_in_turn": True})
] + [Settings(feed_forward_chunks=5, residual_strips=3, transformer_chunks=4, park_skips=True, guidance_in_turn=True)]
"""Together with what moves the weights, and all that cuts a UNet's maps."""
WANTED = ("inputs", "text", "parameters", "some parameters")
TOLERANCE = {Fidelity.BITWISE: 0.0, Fidelity.ROUNDING: 1e-4}
NARROWS = ("precision", "weight_storage")
"""Knobs that compute with other numbers than the plain model does."""


def every_knob() -> Iterator[Settings]:
    """One for each choice of every knob that there is, and what is often together."""
    for name, knob in knobs().items():
        values = knob.choices or ((True,) if knob.type is bool else (MANY.get(name, 4),))
        for value in values:
            yield Settings(**BESIDE.get(name, {}), **{name: value})
    yield from OFTEN


def named(settings: Settings) -> str:
    return ",".join(f"{name}={value}" for name, _, value in settings.decided())


def tolerance(settings: Settings) -> float | None:
    """How far gradients may be from the plain model's; None: those of what was computed are asked for."""
    fidelity = max(knob.fidelity_of(value) for _, knob, value in settings.decided())
    return TOLERANCE.get(fidelity)


class Case:
    """A UNet or an autoencoder in float32, of which only what is ``wanted`` requires gradients, and its loss."""

    def __init__(self, part: str, wanted: str, device: str = "cpu", model: Any = None) -> None:
        self.part, self.wanted, self.device = part, wanted, device
        self.model = getattr(tiny.tiniest(), part) if model is None else model
        noise = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(2, 4, 40, 40, generator=noise)
        self.text = torch.randn(2, 7, getattr(self.model.config, "cross_attention_dim", 8), generator=noise)
        used = {"unet": "", "vae": "decoder."}[part] + ("mid_block" if wanted == "some parameters" else "")
        every = self.model.requires_grad_(False).named_parameters()
        self.weights = [weight for name, weight in every if name.startswith(used)] if "parameters" in wanted else []
        for weight in self.weights:
            weight.requires_grad_(True)

    def output(self, inputs: Tensor, text: Tensor, timestep: int) -> Tensor:
        """On the device on which it is called, as a host would."""
        inputs = inputs.to(self.device)
        if self.part == "vae":
            return self.model.decode(inputs).sample
        step = torch.tensor(timestep, device=self.device)
        return self.model(inputs, step, text.to(self.device)).sample

    def loss(self, inputs: Tensor, text: Tensor) -> Tensor:
        made = self.output(inputs, text, 500)
        probe = torch.randn(made.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        return (made.cpu().double() * probe).sum()

    def gradients(self, before: bool = True) -> list[Tensor]:
        """Of the loss by what is wanted.

        Args:
            before: a step without gradients comes first, as in a run. It may take long where it has code compiled.
        """
        if before:
            with torch.no_grad():
                self.output(self.inputs, self.text, 900)
        inputs = self.inputs.clone().requires_grad_(self.wanted == "inputs")
        text = self.text.clone().requires_grad_(self.wanted == "text")
        self.model.zero_grad()
        self.loss(inputs, text).backward()
        return [leaf.grad for leaf in (inputs, text, *self.weights) if leaf.requires_grad]

    def slope(self, step: float = 1e-2) -> tuple[float, Tensor]:
        """The derivative of what is computed along one direction of the inputs by differences; and the direction."""
        way = torch.randn(self.inputs.shape, generator=torch.Generator().manual_seed(1))
        with torch.enable_grad():  # in the way in which a call with gradients computes
            sides = [self.loss((self.inputs + s * way).requires_grad_(), self.text).item() for s in (step, -step)]
        return (sides[0] - sides[1]) / (2 * step), way
