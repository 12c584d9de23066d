"""A call that was ended goes on when it is made again; no other call ever gets its latents."""

from __future__ import annotations

import warnings
from pathlib import Path

import families
import pytest
import torch
from PIL import Image

import sd_lowvram
from sd_lowvram.checkpoints.schedulers import set_scheduler
from sd_lowvram.errors import BadInputError

CALL = {"prompt": "a red apple", "num_inference_steps": 4, "width": 64, "height": 64, "output_type": "latent"}


class StoppedError(Exception):
    pass


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stop_at_two(_pipe, step, _time, values):
    if step == 1:
        raise StoppedError
    return values


def ended(pipe, path: Path, **call) -> None:
    """A call that is stopped in the callback of its second step; two of four steps are in ``path`` then."""
    with pytest.raises(StoppedError):
        sd_lowvram.resumable(pipe, path)(**{**CALL, "generator": seeded(), **call}, callback_on_step_end=stop_at_two)
    assert path.exists()


def steps_of(pipe, call) -> tuple[int, torch.Tensor]:
    """How many steps ``call`` computes, and its latents."""
    computed = []
    handle = pipe.unet.conv_in.register_forward_hook(lambda *_: computed.append(1))
    try:
        latents = call()
    finally:
        handle.remove()
    return len(computed), latents


@pytest.fixture(scope="module")
def pipe():
    return families.plain("sd15")


def test_the_same_call_goes_on(pipe, tmp_path):
    path = tmp_path / "x.latents.safetensors"
    whole = pipe(**CALL, generator=seeded()).images
    ended(pipe, path)
    count, latents = steps_of(pipe, lambda: sd_lowvram.resumable(pipe, path)(**CALL, generator=seeded()).images)
    assert count == 2 and torch.equal(latents, whole)
    assert not path.exists() and "forward" not in vars(pipe.unet)


OTHERS = {
    "prompt": {"prompt": "a blue car"},
    "negative_prompt": {"negative_prompt": "a tree"},
    "generator": {"generator": 2},
    "guidance_scale": {"guidance_scale": 3.0},
    "width": {"width": 72},
    "num_inference_steps": {"num_inference_steps": 5},
    "eta": {"eta": 0.5},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_begins_anew_and_says_what_differs(pipe, tmp_path, name):
    path = tmp_path / "x.latents.safetensors"
    ended(pipe, path)
    other = {**CALL, "generator": 1, **OTHERS[name]}
    seed = other.pop("generator")
    whole = pipe(**other, generator=seeded(seed)).images
    with pytest.warns(UserWarning, match=rf"differs: .*{name}"):
        again = sd_lowvram.resumable(pipe, path)(**other, generator=seeded(seed)).images
    assert torch.equal(again, whole) and not path.exists()


@pytest.mark.parametrize("part", ["unet", "vae", "scheduler"])
def test_another_model_begins_anew(tmp_path, part):
    path, pipe = tmp_path / "x.latents.safetensors", families.plain("sd15")
    ended(pipe, path)
    if part == "scheduler":
        set_scheduler(pipe, "euler")
    else:
        setattr(pipe, part, getattr(families.plain("sd15", seed=1), part))
    whole = pipe(**CALL, generator=seeded()).images
    with pytest.warns(UserWarning, match=rf"differs: .*{part}"):
        assert torch.equal(sd_lowvram.resumable(pipe, path)(**CALL, generator=seeded()).images, whole)


@pytest.mark.parametrize("what", ["image", "mask_image"])
def test_another_picture_or_mask_begins_anew(tmp_path, what):
    """With four channels a mask is looked at between the steps and no denoiser sees it."""
    path, pipe = tmp_path / "x.latents.safetensors", families.plain("sd15", "StableDiffusionInpaintPipeline")
    picture, mask = Image.effect_noise((64, 64), 90).convert("RGB"), Image.linear_gradient("L").resize((64, 64))
    given = {"image": picture, "mask_image": mask, "strength": 1.0}
    ended(pipe, path, **given)
    other = {**given, what: given[what].rotate(180)}
    whole = pipe(**CALL, **other, generator=seeded()).images
    with pytest.warns(UserWarning, match=rf"differs: .*{what}"):
        assert torch.equal(sd_lowvram.resumable(pipe, path)(**CALL, **other, generator=seeded()).images, whole)
    ended(pipe, path, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert steps_of(pipe, lambda: sd_lowvram.resumable(pipe, path)(**CALL, **given, generator=seeded()))[0] == 2


def test_with_a_plan_attached(tmp_path):
    path, pipe = tmp_path / "x.latents.safetensors", families.plain("sd15")
    sd_lowvram.optimize(pipe, width=64, height=64, settings=sd_lowvram.Settings(offload="layer"))
    whole = pipe(**CALL, generator=seeded()).images
    ended(pipe, path)
    count, latents = steps_of(pipe, lambda: sd_lowvram.resumable(pipe, path)(**CALL, generator=seeded()).images)
    assert count == 2 and torch.equal(latents, whole)


def test_what_cannot_be_used_is_refused_before_a_step(pipe, tmp_path):
    path = tmp_path / "x"
    with pytest.raises(BadInputError, match="needs a generator"):
        sd_lowvram.resumable(pipe, path)(**CALL)
    path.write_bytes(b"something of somebody's")
    with pytest.raises(BadInputError, match="holds no latents"):
        sd_lowvram.resumable(pipe, path)(**CALL, generator=seeded())
    assert path.read_bytes() == b"something of somebody's"
    with pytest.raises(BadInputError, match="UNet2DConditionModel"):
        sd_lowvram.resumable(pipe.unet, path)
    with pytest.raises(BadInputError, match="is not an interval"):
        sd_lowvram.resumable(pipe, path, every="5 h")
