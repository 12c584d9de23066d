"""Check that our nodes support a ComfyUI model, and sentences about any other, in ComfyUI's words."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..sd_lowvram.errors import BadInputError, UnsupportedModelError
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.session import anatomy_of
from . import host
from .interfaces import HostVAE, ModelPatcher

_VAES = "the VAEs of SD1.x, SD2.x, SDXL, SD3, FLUX.1, FLUX.2, Qwen-Image, Wan and models that use one of these"

SHARED: dict[str, str] = {}
"""Wrappers of a MODEL that third-party nodes made of two, by key: why it cannot be planned, and what to do."""


class UnservedVAEError(BadInputError):
    """A VAE that our hooks do not know."""


def denoiser_of(model: ModelPatcher) -> Anatomy | None:
    """The anatomy of a MODEL's UNet, which computes as the host lets it; None: of another kind than our hooks know.

    Raises:
        BadInputError: several in one.
    """
    why = next((SHARED[key] for keys in getattr(model, "wrappers", {}).values() for key in keys if key in SHARED), None)
    if why is not None:
        raise BadInputError(why)
    anatomy, _ = _anatomy_or_problem(model.get_model_object("diffusion_model"))
    if anatomy is None or anatomy.denoiser is None:
        return None
    computes = host.computes(model)
    return anatomy if computes is None else dataclasses.replace(anatomy, computes={anatomy.denoiser: computes})


def autoencoder_of(vae: HostVAE) -> Anatomy:
    """The anatomy of a VAE.

    Raises:
        UnservedVAEError: no autoencoder that we know.
    """
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model
    anatomy, why = _anatomy_or_problem(model)
    if anatomy is None or anatomy.autoencoder is None:
        raise UnservedVAEError(
            f"{type(model).__name__} {why}: the low VRAM nodes serve {_VAES}. "
            "Give this one to the stock VAE Decode and VAE Encode"
        )
    return dataclasses.replace(anatomy, computes={anatomy.autoencoder: vae.vae_dtype})


def _anatomy_or_problem(module: Any) -> tuple[Anatomy | None, str]:
    """The anatomy of a model that a plan can be made for; else what stands against it."""
    try:
        return anatomy_of(module), "is of another kind"
    except UnsupportedModelError as error:
        return None, error.why
    except BadInputError:
        return None, "is of another kind"
