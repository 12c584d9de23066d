"""Which of ComfyUI's models our nodes serve, and a sentence in its words about any other."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..sd_lowvram.errors import BadInputError
from ..sd_lowvram.models.anatomy import Anatomy
from ..sd_lowvram.session import anatomy_of
from . import host

_VAES = "the VAEs of SD1.x, SD2.x, SDXL, SD3, FLUX and what shares theirs"
_LATENTS = ("SD15", "SDXL", "SD3", "Flux")
"""The host's formats of latents that those VAEs make."""

_FRAMES = ("time_stack", "time_mixer", "time_mix_blocks")
"""Children of blocks that see several frames of a video together."""


def denoiser_of(model: Any) -> Anatomy:
    """The anatomy of a MODEL's UNet, which computes as the host lets it.

    Raises:
        BadInputError: no UNet that we know.
    """
    unet = model.get_model_object("diffusion_model")
    name = type(model.model).__name__
    anatomy = _known(unet)
    if anatomy is None or anatomy.denoiser is None:
        raise BadInputError(
            f"{name} ({type(unet).__name__}) cannot go through Optimize Model (low VRAM): it serves SD1.x, SD2.x, SDXL "
            f"and its refiner, with 4, 8 or 9 channels.{_what_works(model.model)}"
        )
    computes = host.computes(model)
    return anatomy if computes is None else dataclasses.replace(anatomy, computes={anatomy.denoiser: computes})


def autoencoder_of(vae: Any) -> Anatomy:
    """The anatomy of a VAE.

    Raises:
        BadInputError: no autoencoder that we know.
    """
    vae.throw_exception_if_invalid()
    model = vae.first_stage_model
    anatomy = _known(model)
    if anatomy is None or anatomy.vae is None:
        raise BadInputError(
            f"{type(model).__name__} is no VAE that the low VRAM nodes serve: those are {_VAES}. "
            "Give it to the stock VAE Decode and VAE Encode"
        )
    return dataclasses.replace(anatomy, computes={anatomy.autoencoder or "": vae.vae_dtype})


def _known(module: Any) -> Anatomy | None:
    """The anatomy of a picture's model; None for any other."""
    try:
        return None if _is_of_video(module) else anatomy_of(module)
    except BadInputError:
        return None


def _is_of_video(module: Any) -> bool:
    """Whether blocks in it see several frames together."""
    return any(hasattr(child, name) for child in module.modules() for name in _FRAMES)


def _what_works(base: Any) -> str:
    """What of such a checkpoint our nodes serve, told by the latents that it makes."""
    latents = type(getattr(base, "latent_format", None)).__name__
    if latents not in _LATENTS or _is_of_video(base):
        return ""
    return " Its VAE works: Optimize VAE, or VAE Decode (low VRAM), decodes exactly in bounded memory"
