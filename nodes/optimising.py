"""The nodes that make a MODEL or a VAE run within a budget; all else in the workflow stays stock."""

from __future__ import annotations

from typing import Any

from .autoencoder import optimized_vae
from .denoiser import optimized_model
from .inputs import BATCH, BUDGET, MODEL, PLAN, VAE, knob_inputs, settings_of, side, validated
from .interfaces import HostVAE, ModelPatcher
from .node_request import NodeRequest, PlanRecord
from .report_text import verdict

CATEGORY = "low-vram"


class LowVRAMOptimizeModel:
    """MODEL within a budget. Goes anywhere between loader and sampler, before or after LoRAs."""

    DESCRIPTION = (
        "Makes the model sample within a memory budget, with the same picture (to rounding). The fastest settings that "
        "fit are planned for the size given here, and anew for another size that comes to the sampler."
    )
    CATEGORY = CATEGORY
    FUNCTION = "optimize"
    RETURN_TYPES = ("MODEL", "LOWVRAM_PLAN")
    RETURN_NAMES = ("model", "plan")
    OUTPUT_TOOLTIPS = (
        "the model for the sampler, or for nodes that patch it",
        "what was planned and, after the run, measured: for Report, and for nodes of the VAE",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": MODEL,
                "budget": BUDGET,
                "width": side("width"),
                "height": side("height"),
                "batch": BATCH,
            },
            "optional": {**knob_inputs("denoise"), "plan": PLAN},
        }

    @classmethod
    def VALIDATE_INPUTS(
        cls, budget: str | None = None, width: int | None = None, height: int | None = None
    ) -> bool | str:
        return validated(budget, width=width, height=height)

    def optimize(
        self,
        model: ModelPatcher,
        budget: str,
        width: int,
        height: int,
        batch: int,
        plan: PlanRecord | None = None,
        **knobs: Any,
    ) -> dict[str, Any]:
        node_request = NodeRequest(budget, settings_of(knobs))
        made, record = optimized_model(model, node_request, width, height, batch, plan)
        return {"ui": {"text": [verdict(record)]}, "result": (made, record)}


class LowVRAMOptimizeVAE:
    """VAE whose stock Decode and Encode run exactly, in bounded memory."""

    DESCRIPTION = (
        "Makes the stock VAE Decode and VAE Encode run in bounded memory without seams or colour shifts, and ask the "
        "host only for the memory that they need."
    )
    CATEGORY = CATEGORY
    FUNCTION = "optimize"
    RETURN_TYPES = ("VAE",)
    RETURN_NAMES = ("vae",)
    OUTPUT_TOOLTIPS = ("the VAE for the stock VAE Decode and VAE Encode",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"vae": VAE, "budget": BUDGET},
            "optional": {**knob_inputs("decode", "encode"), "plan": PLAN},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return validated(budget)

    def optimize(self, vae: HostVAE, budget: str, plan: PlanRecord | None = None, **knobs: Any) -> tuple[HostVAE]:
        return (optimized_vae(vae, NodeRequest(budget, settings_of(knobs)), plan),)
