"""A pipeline or a module of any other kind, its weights placed as settings say; what is not planned is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rehearsed
import todays
import torch
from torch import Tensor, nn

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.errors import BadInputError, BudgetError, UnsupportedModelError
from sd_lowvram.units import format_size
from sd_lowvram.weights import weight_bytes

ASKED: dict[str, Any] = {"width": todays.SIZE, "height": todays.SIZE, "device": "cpu"}
WAYS = ("none", "component", "halves", "blocks", "layer")


def lumina2(pipe: Any) -> Tensor:
    text = {"prompt_embeds": todays.noise(1, 24, 64), "negative_prompt_embeds": -todays.noise(1, 24, 64)}
    masks = dict.fromkeys(
        ("prompt_attention_mask", "negative_prompt_attention_mask"), torch.ones(1, 24, dtype=torch.bool)
    )
    return run(pipe, guidance_scale=3.0, **text, **masks)


def run(pipe: Any, **given: Any) -> Tensor:
    seed = torch.Generator().manual_seed(3)
    size = {"width": todays.SIZE, "height": todays.SIZE}
    return torch.as_tensor(pipe(**given, **size, num_inference_steps=2, generator=seed, output_type="pt").images)


KINDS = [(todays.lumina2, lumina2)]


def test_the_largest_picture_is_refused_until_the_call_can_be_rehearsed() -> None:
    pipe, asked = todays.lumina2(), {"vram": "12MiB", "device": "cpu", "settings": Settings(offload="none")}
    with pytest.raises(BadInputError, match=r"cannot be rehearsed \(.*as call"):
        sd_lowvram.max_size(pipe, **asked)
    square = sd_lowvram.max_size(pipe, call=rehearsed.lumina2_call(), **asked)["square"]
    assert square is not None and square.request.width >= 64


@pytest.mark.parametrize(("make", "picture"), KINDS, ids=[make.__name__ for make, _ in KINDS])
def test_any_pipeline_streams(make: Callable[[], Any], picture: Callable[[Any], Tensor]) -> None:
    pipe = make()
    expected, size = picture(pipe), weight_bytes(pipe.transformer, pipe.vae)
    held = {}
    for way in WAYS:
        plan = sd_lowvram.optimize(pipe, vram="1GB", settings=Settings(offload=way), **ASKED)
        with sd_lowvram.measured(pipe) as run:
            assert torch.equal(picture(pipe), expected)
        assert run.peak_bytes > plan.predicted.peak_bytes  # activations come on top
        kept = {"none": "on the device", "component": "one model's at a time on the device"}.get(way, "streamed")
        assert plan.reasons[-1].startswith(f"weights {format_size(size)}, {kept}; the calls of this model are unknown")
        (denoise,) = (stage for stage in plan.stages if stage.name == "denoise")
        assert denoise.component == "transformer" and denoise.activation_bytes == 0
        held[way] = denoise.weights_bytes
    assert held["none"] > held["component"] > max(held["halves"], held["layer"])
    sd_lowvram.restore(pipe)
    assert torch.equal(picture(pipe), expected) and "forward" not in vars(pipe.transformer)


def test_any_module_streams() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).eval()
    given = todays.noise(2, 256)
    expected = model(given)
    plan = sd_lowvram.optimize(model, vram="1MiB", device="cpu", settings=Settings(offload="layer"))
    assert plan.predicted.peak_bytes < weight_bytes(model) // 3
    assert torch.equal(model(given), expected)
    with pytest.raises(BudgetError):
        sd_lowvram.plan(model, vram="1MiB", device="cpu", settings=Settings(offload="none"))
    sd_lowvram.restore(model)
    assert torch.equal(model(given), expected) and all(tensor.grad_fn is None for tensor in model.parameters())


def test_what_has_no_weights_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        sd_lowvram.plan(nn.ReLU(), vram="1GB", settings=Settings(offload="layer"))
    with pytest.raises(UnsupportedModelError):
        sd_lowvram.plan("a name", vram="1GB", settings=Settings(offload="layer"))
