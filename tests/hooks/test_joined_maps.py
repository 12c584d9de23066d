"""The maps of a ControlNet are in one buffer, with the same bits, and the buffer is used again in the next step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import pytest
import tiny
import torch

import sd_lowvram
from sd_lowvram import Settings, session


@pytest.fixture
def pipe() -> Iterator[Any]:
    pipe = families.controlled(1)
    yield pipe
    sd_lowvram.restore(pipe)


def attach(pipe: Any) -> None:
    session.attach(pipe, Settings(), torch.device("cpu"))


def storages(maps: list[torch.Tensor]) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in maps}


def control(pipe: Any, seed: int = 0, rows: int = 2, **how: Any) -> Any:
    """A call of the ControlNet alone."""
    torch.manual_seed(seed)
    latents, text = torch.randn(rows, 4, 8, 8), torch.randn(rows, 77, pipe.unet.config.cross_attention_dim)
    return pipe.controlnet(latents, torch.tensor(1), text, torch.randn(rows, 3, 64, 64), **{"return_dict": False} | how)


def denoise(pipe: Any, down: list[torch.Tensor], mid: torch.Tensor) -> None:
    text = torch.randn(2, 77, pipe.unet.config.cross_attention_dim)
    maps = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    pipe.unet(torch.randn(2, 4, 8, 8), torch.tensor(1), encoder_hidden_states=text, **maps)


@pytest.mark.parametrize("nets", [1, 2])
def test_a_picture_has_the_same_bits(nets: int) -> None:
    pipe = families.controlled(nets)
    given = {"image": [families.IMAGE["image"]] * nets if nets > 1 else families.IMAGE["image"]}
    wanted = tiny.run(pipe, size=families.SIZE, steps=3, **given)
    seen: list[set[int]] = []

    def look(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        seen.append(storages([*given["down_block_additional_residuals"], given["mid_block_additional_residual"]]))

    attach(pipe)
    with pipe.unet.register_forward_pre_hook(look, with_kwargs=True):
        made = tiny.run(pipe, size=families.SIZE, steps=3, **given)
    sd_lowvram.restore(pipe)
    assert torch.equal(made, wanted)
    assert [len(step) for step in seen] == [1, 1, 1]
    assert seen[1] == seen[2]


@torch.no_grad()
def test_maps_are_equal_views_in_their_memory_order(pipe: Any) -> None:
    pipe.controlnet.to(memory_format=torch.channels_last)
    down, mid = control(pipe)
    attach(pipe)
    joined, middle = control(pipe)
    assert len(storages([*joined, middle])) == 1 and len(storages([*down, mid])) == len(down) + 1
    for one, wanted in zip([*joined, middle], [*down, mid], strict=True):
        assert torch.equal(one, wanted) and one.stride() == wanted.stride()
    assert torch.equal(control(pipe, return_dict=True).mid_block_res_sample, mid)


@torch.no_grad()
def test_maps_end_when_the_next_are_made_and_not_before_the_denoiser_has_used_them(pipe: Any) -> None:
    attach(pipe)
    first, second = control(pipe, 1), control(pipe, 2)
    kept = first[1].clone()
    assert torch.equal(first[1], kept) and storages([first[1]]) != storages([second[1]])
    denoise(pipe, *second)
    denoise(pipe, *second)  # as guidance in two calls does
    third = control(pipe, 3)
    assert storages([third[1]]) != storages([first[1]])
    assert torch.equal(first[1], kept)
    assert [one.numel() for one in (*second[0], second[1])] == [0] * (len(second[0]) + 1)


def test_maps_that_autograd_follows_stay_as_they_are(pipe: Any) -> None:
    pipe.controlnet.requires_grad_(True)
    attach(pipe)
    down, mid = control(pipe)
    assert len(storages([*down, mid])) == len(down) + 1
    mid.sum().backward()


@torch.no_grad()
def test_other_sizes_get_a_buffer_of_their_own(pipe: Any) -> None:
    attach(pipe)
    down, mid = control(pipe)
    denoise(pipe, down, mid)
    _, other = control(pipe, rows=1)
    assert storages([other]) != storages([mid]) and mid.numel()
