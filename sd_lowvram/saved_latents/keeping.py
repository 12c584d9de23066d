"""Latents of a pipeline's run, written now and then and before the decode; a run that goes on from such a file.

A run that goes on is prepared as the first one was (text, noise, the picture to start from); the steps that are done
are passed over without the denoiser, and after the last of them latents, scheduler and generators are what they were.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import BadInputError, NotFiniteError
from ..patches import set_patch, wrap
from ..progress import log_event
from .file import Saved, write_saved
from .interval import Interval
from .state import UnkeptStateError, configuration, current_state, pack, unpack

_STATE = "scheduler/"


@dataclass(frozen=True)
class Safety:
    """The file of a run's latents, and what else is written to it.

    Attributes:
        about: function that returns the file's description of the run, of JSON types; called at each writing.
        tensors: further tensors in the file.
        start: the file from which the run resumes.
        retyped: True if the run resumes in another number type than the file's.
    """

    path: Path
    about: Callable[[], dict[str, Any]] = dict
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    interval: Interval = field(default_factory=Interval)
    start: Saved | None = None
    retyped: bool = False


@dataclass(frozen=True)
class _StepState:
    """State after a step."""

    step: int
    latents: torch.Tensor
    scheduler: dict[str, Any]
    generators: list[torch.Tensor]


class Keeper:
    """Looks at a run after each step."""

    def __init__(self, pipe: Any, generators: Sequence[torch.Generator], safety: Safety) -> None:
        self._pipe, self._generators, self._safety = pipe, generators, safety
        self._start = safety.start
        self._latest: _StepState | None = None
        self._written = (0, time.monotonic())
        self._held = 0 if safety.start is None else safety.start.about["step"]
        self._told = False

    @property
    def passes_over(self) -> bool:
        """True if the next steps were done before and are skipped."""
        return self._start is not None

    def begin_anew(self) -> None:
        """Compute all steps: the file is of another run, and goes when this one is first written."""
        self._start, self._held = None, 0

    def record_step(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values with which the pipeline continues after ``step`` (from 1).

        Raises:
            NotFiniteError: the step's latents are NaN or infinite; those of the step before are written.
            BadInputError: the saved latents belong to another run.
        """
        if self._start is not None:
            done, steps = self._start.about["step"], self._start.about["steps"]
            if not step <= done <= steps == self._pipe.num_timesteps:
                raise BadInputError(
                    f"{self._safety.path} is at step {done} of {steps}, and the run has {self._pipe.num_timesteps}"
                )
            if step < done:
                return values
            values = {**values, "latents": self._restore(self._start, values["latents"])}
            self._start, self._written = None, (step, time.monotonic())
        if not values["latents"].isfinite().all():
            self.write()
            raise nan_error(step, self._pipe.num_timesteps, self._place())
        self._latest = _StepState(
            step, values["latents"], current_state(self._pipe.scheduler),
            [generator.get_state() for generator in self._generators],
        )  # fmt: skip
        if self._is_due(step):
            self.write()
        return values

    def _is_due(self, step: int) -> bool:
        (before, when), interval = self._written, self._safety.interval
        return step >= self._pipe.num_timesteps or (
            (interval.steps is not None and step - before >= interval.steps)
            or (interval.seconds is not None and time.monotonic() - when >= interval.seconds)
        )

    def write(self) -> None:
        """Write the latest step if the file holds an older one; a failure is logged once and does not stop the run."""
        moment = self._latest
        if moment is None or moment.step == self._written[0]:
            return
        try:
            write_saved(self._pack(moment), self._safety.path)
            self._held = moment.step
        except UnkeptStateError as error:
            self._tell(f"of {type(self._pipe.scheduler).__name__}, which cannot be resumed exactly: {error}")
        except OSError as error:
            self._tell(f"to {self._safety.path}: {error.strerror or error}")
        self._written = (moment.step, time.monotonic())

    def _place(self) -> Path | None:
        """The file, if it holds the latest step."""
        moment = self._latest
        return self._safety.path if moment is not None and moment.step == self._held else None

    def _tell(self, why: str) -> None:
        if not self._told:
            log_event(__name__, f"the latents of this run cannot be saved {why}")
        self._told = True

    def _pack(self, moment: _StepState) -> Saved:
        scheduler = self._pipe.scheduler
        tensors = dict(self._safety.tensors)
        latents = pack(moment.latents, "latents", tensors)
        tensors |= {f"generator.{number}": state for number, state in enumerate(moment.generators)}
        state = {name: pack(value, _STATE + name, tensors) for name, value in moment.scheduler.items()}
        scheduler_state = {"class": type(scheduler).__name__, "config": configuration(scheduler), "state": state}
        about = {
            "step": moment.step,
            "steps": self._pipe.num_timesteps,
            "latents": latents,
            "scheduler": scheduler_state,
        }
        return Saved({**self._safety.about(), **about}, tensors)

    def _restore(self, start: Saved, latents: torch.Tensor) -> torch.Tensor:
        """Set scheduler and generators to their state in ``start``; return its latents.

        Raises:
            BadInputError: ``start`` belongs to another run.
        """
        path, scheduler, stored = self._safety.path, self._pipe.scheduler, start.about.get("scheduler")
        if not isinstance(stored, dict) or not isinstance(stored.get("state"), dict):
            raise BadInputError(f"{path} lacks the state of its scheduler")
        if (stored.get("class"), stored.get("config")) != (type(scheduler).__name__, configuration(scheduler)):
            raise BadInputError(
                f"{path} is of a run by {stored.get('class')}, and the model's scheduler is another now"
            )
        try:
            tensors = _match_type(start.tensors, latents) if self._safety.retyped else start.tensors
            saved: torch.Tensor = unpack(start.about["latents"], tensors, latents.device)
            states = [tensors[f"generator.{number}"] for number in range(len(self._generators))]
            state = {name: unpack(tree, tensors, latents.device) for name, tree in stored["state"].items()}
            if (saved.shape, saved.dtype) != (latents.shape, latents.dtype):
                raise ValueError("latents of another size or type")
            if any(hasattr(type(scheduler), name) for name in state):
                raise ValueError("a name of the scheduler's own")
            for generator, before in zip(self._generators, states, strict=True):
                generator.set_state(before)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadInputError(f"{path} lacks what its run needs to continue ({error})") from error
        vars(scheduler).update(state)
        return saved


def _match_type(tensors: dict[str, torch.Tensor], latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """``tensors`` with those that are like ``latents`` in its type: what a scheduler remembers of steps among them."""
    return {
        name: tensor.to(latents.dtype) if tensor.is_floating_point() and tensor.shape == latents.shape else tensor
        for name, tensor in tensors.items()
    }


def nan_error(step: int, steps: int, saved: Path | None = None) -> NotFiniteError:
    """The error for NaN or infinity in the result of ``step`` of ``steps``.

    Args:
        saved: the file with the latents of the step before.
    """
    message = f"step {step} of {steps} computed values beyond the model's number type (NaN or infinity)"
    if saved is None:
        return NotFiniteError(f"{message}. Load the model in a wider type: --precision fp32 or bf16")
    resume = f"sd-lowvram resume {shlex.quote(str(saved))} --precision fp32"
    return NotFiniteError(
        f"{message}; the latents of step {step - 1} are in {saved}: {resume} continues in a wider type"
    )


@contextlib.contextmanager
def keep_latents(pipe: Any, generators: Sequence[torch.Generator], safety: Safety) -> Iterator[Keeper]:
    """Save the latents of a run of ``pipe`` within the block; the run calls ``record_step`` of the yielded keeper
    after each step.

    If the block is left early, for whatever reason, the file holds the last finished step.

    Args:
        generators: the generators from which the run draws its noise.
    """
    keeper = Keeper(pipe, generators, safety)
    with contextlib.ExitStack() as stack:
        if keeper.passes_over:
            denoiser = denoiser_of(pipe)
            stack.callback(set_patch(wrap(denoiser, "forward", functools.partial(_skip_call, keeper, denoiser))))
        try:
            yield keeper
        except BaseException:
            keeper.write()
            raise


def _skip_call(keeper: Keeper, denoiser: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The denoiser's call; of steps that were done before, something of the right shape, which nobody looks at."""
    if not keeper.passes_over:
        return original(*args, **kwargs)
    latents = args[0] if args else next(kwargs[name] for name in ("sample", "hidden_states", "x") if name in kwargs)
    maps = hasattr(latents, "dim") and latents.dim() == 4  # else tokens, or a list of maps
    return (latents[:, : denoiser.config.out_channels] if maps else latents,)


def denoiser_of(pipe: Any) -> Any:
    """The UNet or the transformer of a pipeline; None: it has neither."""
    return getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
