"""Inputs of the stages of a run, which every family fills in from its target's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..weights import first_tensor

CONTROL = "controlnet"
"""The name under which pipelines hold their ControlNet."""

SAFETY_CHECKER = "safety_checker"
"""The name under which they hold what looks at the finished pictures."""

CONTROL_STAGE = "control"
"""The name of its stage, in plans and in recordings."""

TEXT_STAGE = "text"
"""The name of the stages of text encoders, which need the same memory for every size of picture."""


@dataclass(frozen=True)
class Shape:
    """The requested picture in pixels, pictures at a time, and the denoiser's rows for each of them.

    Attributes:
        frames: of latents that the autoencoder sees together; a picture is one.
    """

    width: int
    height: int
    batch: int = 1
    passes: int = 2
    frames: int = 1

    @property
    def rows(self) -> int:
        """The denoiser's batch."""
        return self.batch * self.passes


@dataclass(frozen=True)
class Stage:
    """A part of a run.

    Attributes:
        name: name for people: "text", "adapter", "control", "denoise", "decode" or "encode".
        component: the component whose weights it needs.
        run: the call, with modules and inputs of the fake model.
        inputs: function that makes empty tensors for it.
        repeats: True if it runs once a step, False for once a picture.
        times: how often a run has it; 0: as often as ``repeats`` says.
        facts: what a trace of it depends on in addition to the tensors of ``inputs``.
        reads: True if its model reads values, so that equal modules may be called unequally.
    """

    name: str
    component: str
    run: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    repeats: bool = False
    times: int = 0
    facts: Any = None
    reads: bool = False


class StepInputs(NamedTuple):
    """Inputs of a denoising step.

    Rows are those of the denoiser's batch: every picture's first pass, every picture's second, and so on.

    Attributes:
        latents: (pictures, C, h, w), what the autoencoder decodes in the end, or as the denoiser packs them.
        timestep: of no dimension.
        text: (rows, tokens, width).
        beside: (rows, c, h, w), input channels behind those of the latents: a mask and the masked picture,
            the picture to be edited, depth, or the small picture to be enlarged.
        labels: (rows,) of kinds or noise levels, or (rows, width).
        guidance: (rows, width), the guidance scale's embedding in a model that was distilled with it.
        held: what the host holds besides while it denoises.
        added: what a denoiser of diffusers takes as ``added_cond_kwargs``: by name, (rows, ...) each, or None.
    """

    latents: Tensor
    timestep: Tensor
    text: Tensor
    beside: Tensor | None = None
    labels: Tensor | None = None
    guidance: Tensor | None = None
    added: dict[str, Any] = {}  # noqa: RUF012
    held: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class LatentsInCall:
    """The latents in a call of a denoiser.

    Attributes:
        latents: a tensor of the call, by which the call is identified.
        rows: rows of its batch.
        area: latent pixels in each row before packing, with those of joined pictures.
        frames: frames (see :class:`Shape`) of such an area in each row.
        size: function that returns their height and width. It may have to read values, so it is called only if the call
            is larger than planned.
    """

    latents: Tensor
    rows: int
    area: int
    size: Callable[[], tuple[int, int]]
    frames: int = 1


_MAPS = ("sample", "x", "z", "hidden_states")
"""Names of the first argument of denoisers and autoencoders, for calls by keyword in any order."""


def map_in_call(component: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LatentsInCall | None:
    """Return the latents (N, C, h, w), or frames of them (N, C, frames, h, w), in a call.

    Args:
        component: the denoiser.
        args, kwargs: arguments of the call; the first one is the map.

    Returns:
        The latents; None if there are none.
    """
    named = (kwargs[name] for name in _MAPS if name in kwargs)
    x = first_tensor(args) if args else first_tensor(list(named))
    if x is None or x.dim() not in (4, 5):
        return None
    height, width = x.shape[-2:]
    frames = x.shape[2] if x.dim() == 5 else 1
    return LatentsInCall(x, len(x), int(height * width), lambda: (int(height), int(width)), frames)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, and arguments by name."""

Predict = Callable[[Any, Tensor, StepInputs], Tensor]
"""``(denoiser, x, inputs)`` to the prediction; ``x`` (rows, C + c, h, w) is what it is for, ``inputs`` all else."""


def make_batch(inputs: StepInputs) -> Tensor:
    """Return the batch (rows, C + c, h, w) of a denoiser: the latents for each pass, with the channels beside them."""
    passes = len(inputs.text) // len(inputs.latents)
    x = torch.cat([inputs.latents] * passes) if passes > 1 else inputs.latents
    return x if inputs.beside is None else torch.cat([x, inputs.beside], -1 if x.dim() == 3 else 1)


def denoise_step(denoiser: nn.Module, inputs: StepInputs, predict: Predict) -> Tensor:
    """Run a step as pipelines do: repeat the latents, predict, guide and update, holding the same tensors.

    Args:
        denoiser: the denoiser.
        inputs: inputs of the step.
        predict: the family's call of the denoiser.

    Returns:
        The latents of the next step.
    """
    latents = inputs.latents
    passes = len(inputs.text) // len(latents)
    predicted = predict(denoiser, make_batch(inputs), inputs)
    if passes > 1:
        first, *remaining = predicted.chunk(passes)
        predicted = first
        for other in remaining:
            predicted = predicted + 7.5 * (other - first)
    return latents - 0.1 * predicted[:, : latents.shape[1]]  # the rest is of no use to the pipelines that have it
