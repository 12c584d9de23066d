"""A pipeline's call that goes on where an earlier one, with the same arguments, was ended."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import BadInputError
from ..patches import set_patch, wrap
from .file import read_saved
from .interval import Interval, parse_interval
from .keeping import Keeper, Safety, denoiser_of, keep_latents
from .same_call import digest, digests_of_arguments, digests_of_pipeline

_CALL = "call"
"""Name of the digests in the file's description of its run."""

_LATENTS, _CALLBACK, _NEEDED = "latents", "callback_on_step_end", "callback_on_step_end_tensor_inputs"


def resumable(pipe: Any, path: str | os.PathLike[str], *, every: str = "1min") -> Callable[..., Any]:
    """Wrap ``pipe`` in a function that is called like the pipeline and resumes an interrupted call.

    The latents (some MB) are written to ``path`` at an interval, before the decode, and when an error or Ctrl-C stops
    the call. The same call again skips the finished steps and returns the bits of an uninterrupted call. The file is
    deleted when the picture is done. The file belongs to one call. For another call (another prompt, seed, size,
    guidance scale, input picture or mask, scheduler, number of steps, model, LoRA, precision or version) the run starts
    from the beginning, and a warning names the difference. Your own callback is called for the steps that are computed;
    it is not compared.

    Args:
        pipe: a pipeline of diffusers with a UNet or a transformer, with or without a plan of ours.
        path: the file; a name that ends in ``.latents.safetensors`` is usual.
        every: interval of writing: "30s", "5min", "10steps", or "never" for the decode alone.

    Returns:
        A function with the arguments and the result of ``pipe(...)``. ``generator`` is required: a generator, or a list
        of them, seeded as for the interrupted call.

    Raises:
        BadInputError: here, if ``pipe`` cannot resume from a step or ``every`` is not an interval. By the function, if
            ``generator`` is missing, or ``path`` is another kind of file or damaged.
    """
    taken = inspect.signature(pipe.__call__).parameters if callable(pipe) else {}
    if denoiser_of(pipe) is None or not {"generator", _CALLBACK, _NEEDED} <= taken.keys():
        raise BadInputError(
            f"{type(pipe).__name__} cannot resume from saved latents: that takes a pipeline of diffusers with a UNet "
            f"or a transformer, whose call takes generator and {_CALLBACK}, as StableDiffusionPipeline does"
        )
    return functools.partial(_call_pipe, pipe, Path(path), parse_interval(every, "every"))


def _call_pipe(pipe: Any, path: Path, interval: Interval, *args: Any, **kwargs: Any) -> Any:
    arguments = inspect.signature(pipe.__call__).bind(*args, **kwargs)
    generator = arguments.arguments.get("generator")
    if not generator:
        raise BadInputError(
            "a call that can be resumed needs a generator: give generator=torch.Generator().manual_seed(1), with a "
            "seed of yours"
        )
    start = read_saved(path) if path.exists() else None
    call = digests_of_pipeline(pipe) | digests_of_arguments(arguments)
    safety = Safety(path, lambda: {_CALL: call}, interval=interval, start=start)
    generators = list(generator) if isinstance(generator, list | tuple) else [generator]
    with keep_latents(pipe, generators, safety) as keeper:
        compare = _Compare(keeper, call, start.about.get(_CALL) if start else None, path)
        undo = set_patch(wrap(denoiser_of(pipe), "forward", compare))
        try:
            theirs, needed = arguments.arguments[_CALLBACK], arguments.arguments[_NEEDED]
            arguments.arguments[_CALLBACK] = functools.partial(_step_callback, keeper, theirs)
            arguments.arguments[_NEEDED] = [*needed, *({_LATENTS} - {*needed})]
            result = pipe(*arguments.args, **arguments.kwargs)
        finally:
            undo()
    path.unlink(missing_ok=True)
    return result


def _step_callback(keeper: Keeper, theirs: Any, pipe: Any, step: int, time: Any, values: dict[str, Any]) -> Any:
    """The pipeline's callback: ours, and then that of the caller for a step that was computed."""
    passed_over = keeper.passes_over
    values = keeper.record_step(step + 1, values)
    return values if theirs is None or passed_over else theirs(pipe, step, time, values)


class _Compare:
    """Compares the denoiser's first call with the saved one.

    That call holds everything that was computed from the arguments: the conditions, and the first latents with a
    picture, a mask or control maps in them. If the call or the arguments differ from ``before``, the keeper starts
    from the beginning."""

    def __init__(self, keeper: Keeper, call: dict[str, str], before: Any, path: Path) -> None:
        self._keeper, self._call, self._before, self._path = keeper, call, before, path
        self._seen = False

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._seen:
            self._seen = True
            self._call["conditions and first latents"] = digest([args, kwargs])
            if self._keeper.passes_over:
                self._check()
        return original(*args, **kwargs)

    def _check(self) -> None:
        before = self._before if isinstance(self._before, dict) else {}
        differing = [name for name in (*self._call, *(before.keys() - self._call.keys())) if
                  before.get(name) != self._call.get(name)]  # fmt: skip
        if differing:
            shown = ", ".join(differing[:8]) + (", ..." if len(differing) > 8 else "")
            warnings.warn(
                f"{self._path} is of another call (what differs: {shown}): this one starts from the beginning and "
                "replaces it",
                stacklevel=2,
            )
            self._keeper.begin_anew()
