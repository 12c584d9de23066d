"""The picture that a run heads for, from what the denoiser says at a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..patches import set_patch, wrap


@contextlib.contextmanager
def show_predictions(pipe: Any, every: int, show: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``show(step, latents)`` after every ``every`` steps of ``pipe`` within the block.

    ``step`` counts from 1; ``latents`` (N, C, H, W), unscaled, are the predicted result, without the remaining noise.
    Schedulers without ``alphas_cumprod`` do not define how much noise remains; their latents are passed as they are.
    Fidelity: ``bitwise``; no method of the scheduler that changes its state is called.
    """
    steps = functools.partial(_step, pipe, every, show, [0])
    with contextlib.ExitStack() as stack:
        stack.callback(set_patch(wrap(pipe.scheduler, "step", steps, "previews")))
        yield


def _step(
    pipe: Any,
    every: int,
    show: Callable[[int, Tensor], None],
    done: list[int],
    original: Callable[..., Any],
    output: Tensor,
    timestep: Any,
    sample: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    done[0] += 1
    if done[0] % every == 0:
        config = pipe.vae.config
        latents = predict_latents(pipe.scheduler, output, timestep, sample) / config.scaling_factor
        show(done[0], latents + (getattr(config, "shift_factor", None) or 0))
    return original(output, timestep, sample, *args, **kwargs)


def predict_latents(scheduler: Any, output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
    """Latents (N, C, H, W) that ``output``, the denoiser's for ``sample`` at ``timestep``, heads for."""
    cumulative = getattr(scheduler, "alphas_cumprod", None)
    if cumulative is None:
        return sample
    noisy: Tensor = scheduler.scale_model_input(sample, timestep)
    signal: Tensor = cumulative[int(timestep)].to(sample.device).sqrt()
    noise = (1 - signal**2).sqrt()
    kind = scheduler.config.prediction_type
    if kind == "sample":
        return output
    return signal * noisy - noise * output if kind == "v_prediction" else (noisy - noise * output) / signal
