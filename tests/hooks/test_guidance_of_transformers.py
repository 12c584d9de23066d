"""Both rows of a guided picture one after the other in the blocks of a transformer: the same picture, less memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny
import todays
import torch
from torch import Tensor

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.errors import NoSiteError
from sd_lowvram.session import attachments

SITES = {todays.sd3: 4, todays.z_image: 5}
IN_TURN = Settings(guidance_in_turn=True)
SIZE = {"width": 512, "height": 1024}


def latents(pipe: Any, **options: Any) -> Tensor:
    return todays.picture(pipe, **SIZE, steps=1, output_type="latent", **options)


@pytest.mark.parametrize("make", SITES, ids=lambda make: make.__name__)
def test_rows_in_turn_give_the_picture_in_less_memory(make: Any) -> None:
    pipe = make()
    expected, peaks = latents(pipe), []
    for settings in (Settings(inference_mode=True), IN_TURN, Settings(guidance_in_turn=True, transformer_chunks=2)):
        with attached(pipe, settings, device="cpu"), sd_lowvram.measured(pipe) as run:
            assert tiny.relative_error(latents(pipe), expected) < 1e-6
            hit = attachments(pipe)[0].sites
        peaks.append(run.peak_bytes)
    assert hit["guidance_in_turn"] == hit["transformer_chunks"] == SITES[make]
    assert peaks[2] < peaks[1] < 0.85 * peaks[0], peaks
    assert torch.equal(latents(pipe), expected)


@pytest.mark.parametrize(
    ("make", "why"),
    [(todays.chroma, "guides by a second call"), (todays.flux, "does not guide by a second row")],
    ids=["chroma", "flux"],
)
def test_pipelines_that_never_have_both_rows_in_a_call_are_refused(make: Any, why: str) -> None:
    with pytest.raises(NoSiteError, match=f"guidance in turn: the pipeline {why}"), attached(make(), IN_TURN):
        pass


def test_a_processor_that_may_look_at_several_rows_is_given_all() -> None:
    pipe = todays.sd3()
    attention = pipe.transformer.transformer_blocks[0].attn
    known = type(attention.processor)
    rows: list[int] = []
    plain = attention.forward
    attention.forward = functools.wraps(plain)(
        lambda hidden_states, **more: rows.append(len(hidden_states)) or plain(hidden_states, **more)
    )
    for processor in (known(), type("Theirs", (known,), {})()):
        attention.processor = processor
        with attached(pipe, IN_TURN, device="cpu"):
            latents(pipe)
    assert rows == [1, 1, 2]


def test_gradients_are_those_of_the_plain_model() -> None:
    pipe = todays.sd3()
    given: dict[str, Any] = {"encoder_hidden_states": todays.noise(2, 333, 64), "timestep": torch.ones(2)}
    given |= {"pooled_projections": todays.noise(2, 64), "return_dict": False}
    weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight

    def gradient() -> Tensor:
        made = pipe.transformer(todays.noise(2, 16, 8, 8), **given)[0]
        return torch.autograd.grad(made.square().sum(), weight)[0]

    expected = gradient()
    with attached(pipe, IN_TURN, device="cpu"):
        assert torch.equal(gradient(), expected)
