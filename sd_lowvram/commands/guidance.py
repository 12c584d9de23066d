"""Meaning of ``--guidance``, ``--negative`` and ``--scheduler`` for a pipeline, from the arguments that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import BadInputError
from .inputs import USUAL_GUIDANCE, Job

_TRUE = "true_cfg_scale"
"""The argument of pipelines that guide by a second call only where a negative prompt is given."""


def usual_guidance(pipe: Any) -> float:
    """The guidance scale of a job that states none: of a transformer that of its pipeline."""
    if hasattr(pipe, "unet"):
        return USUAL_GUIDANCE
    return float(_takes(pipe)[_scale_of(pipe)].default)


def guidance_arguments(job: Job, pipe: Any) -> dict[str, Any]:
    """The arguments of a call of ``pipe`` that come from the guidance scale and the negative prompt.

    FLUX.1 has guidance embedded, FLUX.2 Klein guides by an empty prompt, and Qwen-Image only where there is a negative
    one, for which a blank stands.
    """
    scale = _scale_of(pipe)
    arguments: dict[str, Any] = {scale: job.guidance}
    blank = " " if scale == _TRUE and (job.guidance or 0) > 1 else ""
    # None, not an empty text: SDXL says in its configuration that it wants zeros then.
    negative = job.negative or blank
    if "negative_prompt" in _takes(pipe):
        arguments["negative_prompt"] = [negative] * job.batch if negative else None
    return arguments


def is_guided(job: Job, pipe: Any) -> bool:
    """True if ``pipe`` guides at the scale of ``job``: most pipelines above 1, Z-Image's and Krea 2's above 0."""
    from ..session import anatomy_of

    return job.guidance is None or job.guidance > anatomy_of(pipe).family.guides_above


def check_calls(job: Job, pipe: Any) -> None:
    """Raise BadInputError where ``job`` asks for what its pipeline does not do."""
    kind = type(pipe).__name__
    if job.negative and ("negative_prompt" not in _takes(pipe) or _is_embedded(pipe)):
        raise BadInputError(f"--negative is not for {kind}, which does not guide by a negative prompt: leave it out")


def check_scheduler(name: str, pipe: Any) -> None:
    """Raise BadInputError where the model is not made for such schedulers."""
    if not hasattr(pipe, "unet"):
        raise BadInputError(
            f"--scheduler {name} is not for {type(pipe).__name__}, which goes by {type(pipe.scheduler).__name__}: "
            "leave it out"
        )
    if "sigma_data" in pipe.scheduler.config:  # EDM: its UNet takes noise levels, not the steps of a schedule
        raise BadInputError(
            f"--scheduler {name} is not for this model, which is sampled by noise levels (EDM) and goes by "
            f"{type(pipe.scheduler).__name__}: leave it out"
        )


def takes_size(pipe: Any) -> bool:
    """True if a pipeline that starts from a picture takes the size as well."""
    return "width" in _takes(pipe)


def _takes(pipe: Any) -> Mapping[str, Any]:
    from ..models.dit import arguments  # and torch, for which bad input does not wait

    return arguments(pipe)


def _scale_of(pipe: Any) -> str:
    """The argument that is the guidance scale, as the pipeline's family has it."""
    from ..session import anatomy_of

    return anatomy_of(pipe).family.guidance_scale


def _is_embedded(pipe: Any) -> bool:
    """True if the guidance scale is an input of the model, and a negative prompt needs another scale."""
    embeds = "guidance_embeds" in getattr(getattr(pipe, "transformer", None), "config", {})
    return embeds and _scale_of(pipe) != _TRUE and _TRUE in _takes(pipe)
