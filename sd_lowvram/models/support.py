"""Refusals of models that cannot be planned, all in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import BadInputError, ConflictError, UnsupportedModelError
from .anatomy import has

Served = Mapping[str, Callable[[Any], bool]]
"""Functions that return True for a supported module, by the name of the part in its target."""

WHOLE = "SD1.x, SD2.x, SDXL, SD3, FLUX.1, FLUX.2 Klein, Z-Image, Chroma, Qwen-Image and Krea 2"
"""The models that are served from the prompt to the picture."""

AUTOENCODERS = "SD3, FLUX.1, FLUX.2, Z-Image, Chroma, Qwen-Image and Wan"
"""Models of which the autoencoder is served."""

_TOLD_FIRST = ("transformer", "unet", "prior", "decoder", "vae")


def check(owner: Any, parts: Mapping[str, nn.Module], served: Served) -> None:
    """Refuse ``owner`` unless every part of it can be planned.

    Args:
        owner: the pipeline.
        parts: its models by name.
        served: the kinds of models that are planned, by name.

    Raises:
        UnsupportedModelError: a part cannot be planned.
    """
    unknown = [name for name, module in parts.items() if name not in served or not served[name](module)]
    if not unknown:
        return
    works = names_planned_alone(parts)
    order = [*(name for start in _TOLD_FIRST for name in unknown if name.startswith(start)), *unknown]
    part = next((name for name in order if name not in works), order[0])
    raise unsupported_error(owner, part, parts[part], works)


def names_planned_alone(parts: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of ``parts`` that are planned when they are given by themselves."""
    from . import dissect

    def is_planned(part: Any) -> bool:
        try:
            return isinstance(part, nn.Module) and dissect(part) is not None
        except (UnsupportedModelError, ConflictError):
            return False

    return tuple(name for name, part in parts.items() if is_planned(part))


def check_casting(parts: Mapping[str, nn.Module]) -> None:
    """Refuse parts whose weights diffusers casts around every call of a layer, which a trace cannot follow.

    Raises:
        ConflictError: a part is cast layer by layer.
    """
    for name, part in parts.items():
        if "layerwise_casting" in diffusers_hooks(part):
            raise ConflictError(
                f"{name} has diffusers' layerwise casting on (enable_layerwise_casting), which no plan follows: load "
                "it again without, and ask for weight_storage='fp8', which does the same",
                plainly=f"{name} changes the type of its weights in every layer already: load it without that",
            )


def check_moved(parts: Mapping[str, nn.Module]) -> None:
    """Refuse parts whose weights accelerate or diffusers moves: nobody else can move them, and no plan of their memory
    holds.

    Raises:
        ConflictError: a part is moved by other hooks.
    """
    for name, part in parts.items():
        if any(not isinstance(getattr(module, "_hf_hook", _HERE), ExecutionDevice) for module in part.modules()):
            raise ConflictError(
                f"{name} is offloaded by accelerate or diffusers already: call remove_all_hooks() of the pipeline "
                "first",
                plainly=_MOVED.format(name),
            )
        if "group_offloading" in diffusers_hooks(part):
            raise ConflictError(
                f"{name} is offloaded by diffusers in groups already, which it cannot undo: load it again, without "
                "enable_group_offload()",
                plainly=_MOVED.format(name),
            )


_MOVED = "another program moves the weights of {} already: load the model without that"


class ExecutionDevice:
    """A hook that says to a pipeline of diffusers on which device its models run, as accelerate's hooks do.

    Without it, a pipeline whose weights wait in host memory runs its own code there: it draws the noise there, refuses
    a CUDA generator, and mixes guidance and steps in 16 bits on the processor. That gives other bits than on the
    device, and waits for the device in each step.

    Source: ``DiffusionPipeline._execution_device``, which reads ``_hf_hook`` of its modules.
    """

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module, as accelerate does for ``remove_all_hooks()``."""
        return module


_HERE = ExecutionDevice(torch.device("cpu"))


def run_pipeline_on(pipeline: Any, device: torch.device) -> Callable[[], None]:
    """Make a diffusers pipeline create its tensors on ``device``, if needed; return the function that undoes this."""
    own = getattr(pipeline, "_execution_device", device)
    parts = [part for part in pipeline.components.values() if isinstance(part, nn.Module)] if own != device else []
    free = [part for part in parts if not hasattr(part, "_hf_hook")]
    for part in free:
        part._hf_hook = ExecutionDevice(device)  # type: ignore[assignment]

    def undo() -> None:
        for part in free:
            vars(part).pop("_hf_hook", None)

    return undo


def diffusers_hooks(part: nn.Module) -> set[str]:
    """The names of diffusers' own hooks on a model or on what is in it."""
    registries = (getattr(module, "_diffusers_hook", None) for module in part.modules())
    return {name for registry in registries for name in getattr(registry, "hooks", {})}


def unsupported_error(
    owner: Any, part: str = "", module: Any = None, works: tuple[str, ...] = ()
) -> UnsupportedModelError:
    """Return the error that ``owner`` cannot be planned, with the parts that can be planned by themselves.

    Args:
        owner: the target.
        part: name of the part; empty if ``owner`` itself cannot be planned.
        module: that part.
        works: names of parts that can be planned by themselves.
    """
    module = owner if module is None else module
    parts = getattr(owner, "components", None)
    if isinstance(parts, dict) and not any(isinstance(part, nn.Module) for part in parts.values()):
        return UnsupportedModelError(
            f"{type(owner).__name__} holds no model: all of its parts are None. Load those that this process runs"
        )
    of, kind, why = type(owner).__name__, type(module).__name__, _refusal(part, module, part in works)
    shown = f" ({part}: {kind})" if part else ""
    decodes = ["decode(pipe.vae, latents)"] if "vae" in works else []
    can = ", ".join([*(f"optimize(pipe.{name}, ...)" for name in works), *decodes])
    remedy = f"What works of it: {can}" if can else f"Autoencoders of {AUTOENCODERS} are planned"
    return UnsupportedModelError(
        f"{of} {why}{shown}, which sd-lowvram does not plan. {remedy}; whole pipelines of {WHOLE}. Of any other the "
        "weights are streamed, and no more is planned, by settings=Settings(offload='layer'); plan and "
        "optimize plan a pipeline whole, as its own call is rehearsed",
        owner=of,
        part=part,
        kind=kind,
        why=why,
        works=works,
    )


def reads_values(error: BaseException) -> bool:
    """True for torch's errors that the contents of a fake tensor are required."""
    reads = type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")
    return reads or "numpy() is not supported for tensor subclasses" in str(error)


def cannot_be_called(target: Any, call: Mapping[str, Any], error: Exception) -> BadInputError:
    """Return the error that a pipeline cannot be called as stated.

    Args:
        target: the pipeline.
        call: what the user says of the call.
        error: what the call raised.
    """
    kind, said = type(target).__name__, ", ".join(sorted(call)) or "no arguments"
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return BadInputError(f"{kind} cannot be called with the stated {said} ({message:.300}): state what it requires")


def _refusal(part: str, module: Any, alone: bool) -> str:
    kind = type(module).__name__
    autoencoder = has(module, "encode", "decode")
    denoiser = part == "unet" or any(has(module, *names) for names in _UNETS)
    if "Motion" in kind or ((autoencoder or denoiser) and is_of_video(module)):
        return "makes video"
    if part.startswith("text_encoder"):
        return f"reads prompts {'in another way' if alone else 'with a text encoder of another kind'}"
    if autoencoder:
        return f"{'has' if part else 'is'} an autoencoder of another kind"
    if "Transformer" in kind or _has_blocks(module):
        return "denoises with a transformer"
    if denoiser:
        return "denoises with a UNet of another kind"
    return "has a part" if part else "is a model of another kind"


def _has_blocks(module: Any) -> bool:
    return any(isinstance(getattr(module, name, None), nn.ModuleList) for name in _BLOCKS)


_UNETS = (("down_blocks", "up_blocks", "conv_in"), ("input_blocks", "output_blocks"))
"""Names of the block lists in the UNets of diffusers and of CompVis' descendants."""

_BLOCKS = ("transformer_blocks", "double_blocks", "joint_blocks", "blocks", "layers")
"""Names of the block lists in the transformers of diffusers and of ComfyUI."""


def packed_side(autoencoder: nn.Module) -> int:
    """Side of the squares that its own ``decode`` makes of a latent pixel: 2 behind a batch norm (ComfyUI's of FLUX.2),
    so that its decoder gets latents of another size."""
    return 1 if getattr(autoencoder, "bn", None) is None else 2


def is_of_video(module: nn.Module) -> bool:
    """True for an autoencoder or a denoiser of frames."""
    return any(isinstance(layer, nn.Conv3d) or hasattr(layer, "time_stack") for layer in module.modules())
