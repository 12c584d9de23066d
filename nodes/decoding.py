"""VAE Decode and VAE Encode in one node each, exact and in bounded memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import host
from .autoencoder import optimize_again
from .inputs import BUDGET_OF_VAE, SETTINGS, VAE, checked_budget
from .interfaces import HostVAE
from .node_request import ChosenSettings, settings_or_default
from .optimising import ALIASES, CATEGORY
from .report_text import verdict
from .saving import HIDDEN, Workflow, saved_first

_LATENTS = "LATENT", {"tooltip": "the latents from the sampler"}
_PIXELS = "IMAGE", {"tooltip": "the pictures to start from"}


class LowVRAMVAEDecode:
    """LATENT to IMAGE."""

    DESCRIPTION = (
        "Decodes latents exactly, within a budget: the picture of the stock VAE Decode, without seams or colour shift."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*ALIASES, "tiled", "tiles")
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE", "LOWVRAM_PLAN")
    RETURN_NAMES = ("IMAGE", "plan")
    OUTPUT_TOOLTIPS = ("the pictures", "the plan, and the measured run: for Report")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"samples": _LATENTS, "vae": VAE, "budget": BUDGET_OF_VAE},
            "optional": {"settings": SETTINGS},
            "hidden": HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return checked_budget(budget)

    def decode(
        self,
        samples: dict[str, Tensor],
        vae: HostVAE,
        budget: str,
        settings: ChosenSettings | None = None,
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        workflow = Workflow(prompt or {}, extra_pnginfo or {}, unique_id)
        with host.refusals_in(unique_id):
            optimized, record = optimize_again(vae, budget, settings)
            with saved_first(samples["samples"], settings_or_default(settings).save_latents, workflow):
                pixels = optimized.decode(samples["samples"])
        return {"ui": {"text": [verdict(record, "decode")]}, "result": (pixels, record)}


class LowVRAMVAEEncode:
    """IMAGE to LATENT."""

    DESCRIPTION = "Encodes a picture exactly, within a budget: the latents of the stock VAE Encode."
    CATEGORY = CATEGORY
    SEARCH_ALIASES = (*ALIASES, "tiled", "tiles")
    FUNCTION = "encode"
    RETURN_TYPES = ("LATENT", "LOWVRAM_PLAN")
    RETURN_NAMES = ("LATENT", "plan")
    OUTPUT_TOOLTIPS = ("the latents, for a sampler", "the plan, and the measured run: for Report")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"pixels": _PIXELS, "vae": VAE, "budget": BUDGET_OF_VAE},
            "optional": {"settings": SETTINGS},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return checked_budget(budget)

    def encode(
        self,
        pixels: Tensor,
        vae: HostVAE,
        budget: str,
        settings: ChosenSettings | None = None,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        with host.refusals_in(unique_id):
            optimized, record = optimize_again(vae, budget, settings)
            latents = optimized.encode(pixels[..., :3])
        return {"ui": {"text": [verdict(record, "encode")]}, "result": ({"samples": latents}, record)}
