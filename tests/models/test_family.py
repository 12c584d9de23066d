"""A stranger's family of models: any denoiser is planned whose family says what to call it with."""

from __future__ import annotations

from typing import Any

import pytest
import todays
import torch

import sd_lowvram
from sd_lowvram import optimize, register, restore
from sd_lowvram.errors import BudgetError
from sd_lowvram.session import attachments


def sd3_family() -> Any:
    """StableDiffusion3Pipeline as a stranger would add it: where its models are, and what they are called with."""
    from sd_lowvram.models import diffusers
    from sd_lowvram.models.anatomy import Family
    from sd_lowvram.models.calls import StepInputs
    from sd_lowvram.models.latents import latent_size

    def components_of(target: Any) -> dict[str, Any]:
        parts = getattr(target, "components", {})
        ours = type(parts.get("transformer")).__name__ == "SD3Transformer2DModel"
        return {name: parts[name] for name in ("transformer", "vae")} if ours else {}

    def step_inputs(anatomy: Any, shape: Any) -> StepInputs:
        config, size = anatomy.config("transformer"), latent_size(anatomy, shape)
        text = torch.empty(shape.rows, todays.WORDS, config["joint_attention_dim"])
        pooled = torch.empty(shape.rows, config["pooled_projection_dim"])
        latents = torch.empty(shape.batch, config["in_channels"], *size)
        return StepInputs(latents, torch.tensor(1.0), text, added={"pooled_projections": pooled})

    def predict(transformer: Any, x: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        time = inputs.timestep.expand(len(x))
        return transformer(x, inputs.text, timestep=time, return_dict=False, **inputs.added)[0]

    return Family(
        components_of,
        step_inputs,
        predict,
        diffusers.decode,
        diffusers.encode,
        denoiser="transformer",
        latent_multiple=2,
    )


def test_a_strangers_transformer_is_planned_run_and_restored() -> None:
    pipe = todays.sd3()
    asked: dict[str, Any] = {"width": todays.SIZE, "height": todays.SIZE, "device": "cpu"}
    expected, larger = todays.picture(pipe), todays.picture(pipe, 128, 64)
    unregister = register(families={"sd3": sd3_family()})
    try:
        least = sd_lowvram.plan(pipe, vram="1GB", **asked).minimum_vram_bytes
        for budget in ("1GB", f"{least} B"):
            plan = optimize(pipe, vram=budget, **asked)
            assert [stage.component for stage in plan.stages] == ["transformer", "vae"]
            assert torch.equal(todays.picture(pipe), expected)
        with pytest.MonkeyPatch.context() as patched, pytest.raises(BudgetError, match="512x512"):
            patched.setattr(pipe.scheduler, "step", None)  # which comes after the first call
            todays.picture(pipe, 512, 512)
        optimize(pipe, vram="1GB", **asked)
        assert torch.equal(todays.picture(pipe, 128, 64), larger)
        assert (attachments(pipe)[0].plan.request.width, attachments(pipe)[0].plan.request.height) == (128, 64)
        restore(pipe)
    finally:
        unregister()
    assert torch.equal(todays.picture(pipe), expected) and "forward" not in vars(pipe.transformer)
