"""VAE Decode and VAE Encode in one node each, exact and in bounded memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..sd_lowvram.saved_latents.hosted import CHOICES
from .autoencoder import optimized_vae
from .inputs import BUDGET, PLAN, VAE, knob_inputs, settings_of, validated, with_save_latents
from .interfaces import HostVAE
from .node_request import NodeRequest, PlanRecord
from .optimising import CATEGORY
from .report_text import verdict
from .saving import HIDDEN, Workflow, saved_first

_LATENTS = "LATENT", {"tooltip": "what the sampler gives"}
_PIXELS = "IMAGE", {"tooltip": "the pictures to start from"}


class LowVRAMVAEDecode:
    """LATENT to IMAGE."""

    DESCRIPTION = "Decodes latents exactly, in bounded memory: no seams, no colour shift, the stock untiled picture."
    CATEGORY = CATEGORY
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE",)
    OUTPUT_TOOLTIPS = ("the pictures",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"samples": _LATENTS, "vae": VAE, "budget": BUDGET},
            "optional": with_save_latents({**knob_inputs("decode"), "plan": PLAN}),
            "hidden": HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return validated(budget)

    def decode(
        self,
        samples: dict[str, Tensor],
        vae: HostVAE,
        budget: str,
        plan: PlanRecord | None = None,
        save_latents: str = CHOICES[0],
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
        unique_id: str | None = None,
        **knobs: Any,
    ) -> dict[str, Any]:
        record = PlanRecord() if plan is None else plan
        made = optimized_vae(vae, NodeRequest(budget, settings_of(knobs)), record)
        with saved_first(samples["samples"], save_latents, Workflow(prompt or {}, extra_pnginfo or {}, unique_id)):
            pixels = made.decode(samples["samples"])
        return {"ui": {"text": [verdict(record, "decode")]}, "result": (pixels,)}


class LowVRAMVAEEncode:
    """IMAGE to LATENT."""

    DESCRIPTION = "Encodes a picture exactly, in bounded memory: the stock untiled latents."
    CATEGORY = CATEGORY
    FUNCTION = "encode"
    RETURN_TYPES = ("LATENT",)
    OUTPUT_TOOLTIPS = ("the latents, for a sampler",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"pixels": _PIXELS, "vae": VAE, "budget": BUDGET},
            "optional": {**knob_inputs("encode"), "plan": PLAN},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return validated(budget)

    def encode(
        self, pixels: Tensor, vae: HostVAE, budget: str, plan: PlanRecord | None = None, **knobs: Any
    ) -> dict[str, Any]:
        record = PlanRecord() if plan is None else plan
        latents = optimized_vae(vae, NodeRequest(budget, settings_of(knobs)), record).encode(pixels[..., :3])
        return {"ui": {"text": [verdict(record, "encode")]}, "result": ({"samples": latents},)}
