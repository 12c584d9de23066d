"""Latents in a file next to the pictures, from the end of their sampling to the end of the generation.

A sampler's own call is watched, as a hires fix decodes right after it; what a mask changes then comes with the host's
word that the sampling has ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modules import processing, shared
from torch import Tensor

from sd_lowvram.saved_latents.hosted import CHOICES, Hosted, new_place, write_hosted

from . import host
from .arguments import NAME

_FILES = "sd_lowvram_latents"
"""Attribute of a generation: its files by the number of the batch."""

_CHOICE = "sd_lowvram_save_latents"


def begin(p: Any, choice: str) -> None:
    """Save the latents of the generation ``p`` as ``choice`` says."""
    setattr(p, _CHOICE, choice)
    setattr(p, _FILES, {})


def watch(p: Any) -> None:
    """Save what the sampler of ``p`` is about to make, as soon as it has."""
    if getattr(p, _CHOICE, CHOICES[0]) == CHOICES[0]:
        return
    for way in ("sample", "sample_img2img"):
        original = getattr(p.sampler, way, None)
        if original is not None and getattr(original, "func", None) is not _save_result:
            setattr(p.sampler, way, functools.partial(_save_result, p, original))


def _save_result(p: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    latents = original(*args, **kwargs)
    save(p, latents)
    return latents


def save(p: Any, latents: Any) -> None:
    """Write ``latents``, scaled as the denoiser has them; a failure is logged and raises no error."""
    ended = not isinstance(latents, Tensor) or getattr(latents, "already_decoded", False)
    if ended or getattr(p, _CHOICE, CHOICES[0]) == CHOICES[0]:
        return
    if latents.ndim != 4:
        p.comment(f"{NAME}: latents of {type(shared.sd_model).__name__} have frames and are not saved")
        return
    files: dict[int, Path] = getattr(p, _FILES)
    batch = getattr(p, "iteration", 0)
    path = files.get(batch) or new_place(Path(p.outpath_samples))
    model = shared.sd_model
    hosted = Hosted("the WebUI", host.unscale(model, latents), host.autoencoder_file(model), _texts(p, len(latents)))
    try:
        write_hosted(hosted, path)
    except OSError as error:
        p.comment(f"{NAME}: the latents cannot be saved to {path}: {error.strerror or error}")
        return
    files[batch] = path


def _texts(p: Any, count: int) -> list[dict[str, str]]:
    infotext = functools.partial(processing.create_infotext, p, p.prompts, p.seeds, p.subseeds)
    negative = p.negative_prompts
    return [{"parameters": str(infotext(index=number, all_negative_prompts=negative))} for number in range(count)]


def end(p: Any) -> None:
    """The generation has its pictures: take its files away, unless they are to stay."""
    files: dict[int, Path] = getattr(p, _FILES, {})
    if getattr(p, _CHOICE, CHOICES[0]) != CHOICES[-1]:
        for path in files.values():
            path.unlink(missing_ok=True)
    files.clear()
