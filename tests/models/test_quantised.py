"""Pipelines whose transformer a library has quantised, planned and streamed as they are. Each test is skipped where its
library is not installed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import quantised
import todays
import torch
from torch import Tensor, nn

from sd_lowvram import Settings, attached
from sd_lowvram.weight_parts import links_of, parts_of, registered
from sd_lowvram.weights import all_tensors

SIZES: dict[str, Any] = {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
"""Of which the kernels of 4 bits take the shapes."""


def pipeline(name: str) -> Any:
    pipe = todays.flux(**SIZES)
    quantised.quantised_by(name, pipe.transformer)
    return pipe


def objects(target: nn.Module) -> list[int]:
    links = (link.value for module in target.modules() for link in links_of(module))
    return [*(id(tensor) for _, _, tensor in registered(*target.modules())), *map(id, links)]


def bits(target: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in all_tensors(target)]


def saved(target: nn.Module) -> dict[str, Any]:
    state = target.state_dict().items()
    return {name: list(map(torch.clone, parts_of(one))) for name, one in state if isinstance(one, Tensor)}


@pytest.mark.parametrize("offload", ["none", "layer", "component"])
@pytest.mark.parametrize("name", quantised.LIBRARIES)
@torch.no_grad()
def test_streamed_has_the_bits_of_resident(name: str, offload: str) -> None:
    pipe, resident = pipeline(name), pipeline(name)
    wanted = [todays.picture(resident, output_type="latent") for _ in range(2)]
    todays.picture(pipe, output_type="latent")  # the libraries' first call packs weights, or moves scales
    before, contents = objects(pipe.transformer), bits(pipe.transformer)
    with attached(pipe, Settings(offload=offload)):
        made = [todays.picture(pipe, output_type="latent") for _ in range(2)]
    assert all(map(torch.equal, made, wanted))
    assert objects(pipe.transformer) == before
    assert all(map(torch.equal, bits(pipe.transformer), contents))
    assert torch.equal(todays.picture(pipe, output_type="latent"), wanted[0])
    ours, theirs = saved(pipe.transformer), saved(resident.transformer)
    assert ours.keys() == theirs.keys()
    assert all(map(torch.equal, one, theirs[key]) for key, one in ours.items())


@pytest.mark.parametrize("name", ["nf4", "int8"])
@torch.no_grad()
def test_a_first_call_may_be_a_streamed_one(name: str) -> None:
    pipe, resident = pipeline(name), pipeline(name)
    wanted = [todays.picture(resident, output_type="latent") for _ in range(2)]
    with attached(pipe, Settings(offload="layer")):
        assert all(torch.equal(todays.picture(pipe, output_type="latent"), one) for one in wanted)
    assert torch.equal(todays.picture(pipe, output_type="latent"), wanted[0])
    assert all(map(torch.equal, bits(pipe.transformer), bits(resident.transformer)))


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", quantised.LIBRARIES)
def test_a_pipeline_is_planned_in_its_own_bytes(name: str) -> None:
    pipe = pipeline(name)
    todays.check_budgets(pipe)


@pytest.mark.parametrize("name", ["nf4", "int8", "quanto int8", "torchao int8"])
@torch.no_grad()
def test_what_diffusers_saves_and_moves_is_the_same_after_it(name: str, tmp_path: Path) -> None:
    pipe = pipeline(name)
    with attached(pipe, Settings(offload="layer")):
        todays.picture(pipe, output_type="latent")
    if not name.startswith("quanto"):  # whose tensors cannot be copied so
        assert all(map(torch.equal, bits(copy.deepcopy(pipe.transformer)), bits(pipe.transformer)))
    wanted = todays.picture(pipe, output_type="latent")
    pipe.to("cpu")
    assert torch.equal(todays.picture(pipe, output_type="latent"), wanted)
    torch.save(pipe.transformer.state_dict(), tmp_path / "saved.pt")
    assert (tmp_path / "saved.pt").stat().st_size > sum(tensor.nbytes for tensor in bits(pipe.transformer)) // 2
