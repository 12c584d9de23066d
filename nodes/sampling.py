"""Our wrappers on a MODEL: by hooks that act in its layers, or plain, around the host's own call."""

from __future__ import annotations

from .denoiser import Denoiser
from .hosted import Traced
from .hosted_denoiser import HostedDenoiser
from .interfaces import HostVAE, ModelPatcher
from .node_request import NodeRequest, PlanRecord
from .refusals import denoiser_of

_KEY = "sd-lowvram"


def optimized_model(
    model: ModelPatcher, node_request: NodeRequest, record: PlanRecord, vae: HostVAE | None = None
) -> ModelPatcher:
    """A clone of the ModelPatcher ``model`` that samples within the budget of ``node_request``.

    Args:
        record: where plans and measurements go.
        vae: of :func:`~.autoencoder.optimized_vae`: its decode is planned with each size that is sampled.

    Raises:
        BadInputError: several models in one, or one that makes no pictures.
    """
    hooks = _hooks(model, node_request, record, vae)
    clone = model.clone()
    from comfy.patcher_extension import WrappersMP

    for door, wrapper in (
        (WrappersMP.OUTER_SAMPLE, hooks.outer_sample),
        (WrappersMP.PREPARE_SAMPLING, hooks.prepare_sampling),
        (WrappersMP.APPLY_MODEL, hooks.apply_model),
    ):
        clone.remove_wrappers_with_key(door, _KEY)  # a second node of ours replaces the first
        clone.add_wrapper_with_key(door, _KEY, wrapper)
    return clone


def _hooks(model: ModelPatcher, node_request: NodeRequest, record: PlanRecord, vae: HostVAE | None) -> Denoiser:
    anatomy = denoiser_of(model)
    if anatomy is None:
        return HostedDenoiser(Traced(model), node_request, model.load_device, record, vae)
    return Denoiser(anatomy, node_request, model.load_device, record, vae)


def foresee_sampling(model: ModelPatcher, width: int = 0, height: int = 0, batch: int = 1) -> None:
    """Plan a size in pixels for an optimized ``model`` before a sampler comes with one; 0 is the model's own.

    Raises:
        BudgetError: nothing fits. BadInputError: a size that the model cannot make.
    """
    for hooks in wrappers_of(model):
        hooks.foresee_pixels(width, height, batch)


def wrappers_of(model: ModelPatcher) -> list[Denoiser]:
    """Wrappers that :func:`optimized_model` has put on ``model``."""
    by_door = getattr(model, "wrappers", {}).values()
    owners = {getattr(wrapper, "__self__", None) for by_key in by_door for wrapper in by_key.get(_KEY, ())}
    return [owner for owner in owners if isinstance(owner, Denoiser)]
