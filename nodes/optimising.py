"""The node that makes a MODEL and a VAE run within a budget, and the node of everything that it leaves to the plan."""

from __future__ import annotations

from typing import Any

from ..sd_lowvram.errors import BudgetError
from ..sd_lowvram.knob import FIDELITIES
from . import host
from .autoencoder import optimized_vae
from .inputs import BUDGET, CLIP, MODEL, SAVE_LATENTS, SETTINGS, VAE, checked_budget, knob_inputs, settings_of
from .interfaces import HostVAE, ModelPatcher
from .node_request import ChosenSettings, NodeRequest, PlanRecord, settings_or_default
from .refusals import UnservedVAEError
from .report_text import verdict
from .sampling import foresee_sampling, optimized_model
from .text_encoder import limited_clip

CATEGORY = "low-vram"
ALIASES = ("vram", "memory", "low memory", "out of memory", "oom", "budget", "offload", "low")
"""Words for which the page's search finds our nodes."""


class LowVRAM:
    """MODEL, VAE and CLIP within a budget; all else in the workflow stays stock."""

    DESCRIPTION = (
        "Keeps model and VAE within a VRAM budget, with the same picture. Uses the fastest settings that fit the "
        "picture's size, and shows memory and time before the run."
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "optimize"
    RETURN_TYPES = ("MODEL", "VAE", "LOWVRAM_PLAN", "CLIP")
    RETURN_NAMES = ("model", "vae", "plan", "clip")
    OUTPUT_TOOLTIPS = (
        "the model for the sampler, or for nodes that patch it",
        "the VAE; VAE Decode and VAE Encode then run exactly, within the budget",
        "the plan, and the measured run: for Report",
        "the text encoder, if one is connected; its weights stay within the budget while it encodes",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"model": MODEL, "vae": VAE, "budget": BUDGET},
            "optional": {"settings": SETTINGS, "clip": CLIP},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, budget: str | None = None) -> bool | str:
        return checked_budget(budget)

    def optimize(
        self,
        model: ModelPatcher,
        vae: HostVAE,
        budget: str,
        settings: ChosenSettings | None = None,
        clip: Any = None,
        unique_id: str | None = None,
    ) -> dict[str, Any]:
        node_request = NodeRequest(budget, settings_or_default(settings).settings)
        record = PlanRecord(node=unique_id)
        made_vae = vae
        with host.refusals_in(unique_id):
            try:
                made_vae = optimized_vae(vae, node_request, record)
            except UnservedVAEError as error:
                record.say(f"the VAE passes through unchanged, and the budget does not count it: {error}")
            optimized = optimized_model(model, node_request, record, made_vae)
            try:
                foresee_sampling(optimized)
                shown = verdict(record)
            except BudgetError as error:  # the sampler may come with a smaller size
                shown = f"does not fit at the model's own size: {error}"
        return {
            "ui": {"text": [shown]},
            "result": (optimized, made_vae, record, limited_clip(clip, budget, record.warn)),
        }


class LowVRAMSettings:
    """Settings that the plan would choose, for Low VRAM, Plan and the nodes of the VAE."""

    DESCRIPTION = (
        "Settings that you want to choose yourself; the plan chooses the rest. Groups: memory of the whole run, steps "
        "of the sampler, faster with another picture, decoding and encoding. Each tooltip says what happens to the "
        f"picture. {FIDELITIES}"
    )
    CATEGORY = CATEGORY
    SEARCH_ALIASES = ALIASES
    FUNCTION = "choose"
    RETURN_TYPES = ("LOWVRAM_SETTINGS",)
    RETURN_NAMES = ("settings",)
    OUTPUT_TOOLTIPS = ("for Low VRAM, Plan, VAE Decode and VAE Encode (low VRAM)",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}, "optional": {**knob_inputs(), "save_latents": SAVE_LATENTS}}

    def choose(self, save_latents: str = SAVE_LATENTS[1]["default"], **knobs: Any) -> tuple[ChosenSettings]:
        return (ChosenSettings(settings_of(knobs), save_latents),)
