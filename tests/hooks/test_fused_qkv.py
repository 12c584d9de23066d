"""Queries, keys and values by one product: the same result from fewer products and no more bytes, all of it undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from test_unet_hooks import run
from torch.overrides import TorchFunctionMode

from sd_lowvram import Settings, attached, plan, restore
from sd_lowvram.api import optimize
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.errors import NoSiteError, SettingsError
from sd_lowvram.hooks.placement import _in_one_buffer
from sd_lowvram.models.calls import Shape
from sd_lowvram.planning.stage_costs import Costs
from sd_lowvram.session import anatomy_of
from sd_lowvram.streaming.host_weights import in_files
from sd_lowvram.weights import all_tensors, set_data, weight_bytes

FUSED = Settings(fused_qkv=True)
ATTENTIONS = {"sd15": 32, "sd21": 32, "sdxl": 140}


@pytest.fixture
def unet() -> Any:
    return build_components(tiny.config("sd15"), only=("unet",))["unet"]


class Products(TorchFunctionMode):
    """Counts calls of torch's linear."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    with Products() as products:
        return call(), products.count


def held_bytes(unet: Any) -> int:
    """What its weights hold, each place once."""
    places = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in unet.parameters()}
    return sum(places.values())


@contextlib.contextmanager
def as_before(unet: Any) -> Iterator[None]:
    """Afterwards every weight has its bits, in a place of its own, and nothing of ours is on any module."""
    bits = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    yield
    for name, tensor in unet.state_dict().items():
        assert torch.equal(tensor, bits[name]) and tensor.untyped_storage().nbytes() == tensor.nbytes, name
    assert not any("forward" in vars(module) for module in unet.modules())


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_same_by_fewer_products_without_more_bytes(name: str) -> None:
    unet = build_components(tiny.config(name), only=("unet",))["unet"]
    plain, products = counted(lambda: run(unet))
    with as_before(unet), attached(unet, FUSED, device="cpu") as attachment:
        sites = ATTENTIONS[name]
        assert attachment.sites["fused_qkv"] == sites and held_bytes(unet) == weight_bytes(unet)
        assert attachment.sites["fused_products"] >= 2 * sites + sites // 2
        result, fewer = counted(lambda: run(unet))
        assert products - fewer == sites + sites // 2, "two of a self-attention's three, one of a cross-attention's two"
        assert tiny.relative_error(result, plain) < 1e-5
    assert torch.equal(run(unet), plain)


@pytest.mark.parametrize(
    "more",
    [
        {"attention": "sliced", "attention_mib": 1},
        {"attention": "fused-softmax", "attention_mib": 1},
        {"feed_forward_chunks": 5, "residual_strips": 3, "park_skips": True, "guidance_in_turn": True},
        {"inference_mode": True, "channels_last": True, "precision": "autocast-bf16"},
    ],
    ids=str,
)
def test_beside_other_knobs(unet: Any, more: dict[str, Any]) -> None:
    with attached(unet, Settings(**more), device="cpu"):
        plain, products = counted(lambda: run(unet))
    with attached(unet, Settings(fused_qkv=True, **more), device="cpu"):
        result, fewer = counted(lambda: run(unet))
    passes = 2 if "guidance_in_turn" in more else 1
    assert products - fewer == 48 * passes and tiny.relative_error(result, plain) < 1e-5


def test_chunks_of_queries_make_no_keys_again(unet: Any) -> None:
    """Keys and values of all tokens are there: a chunk asks for its queries alone, and gets no more."""
    plain = run(unet)
    made: list[int] = []

    class Results(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is F.linear:
                made[-1] += result.numel()
            return result

    for knobs in ({}, {"fused_qkv": True}):
        made.append(0)
        with attached(unet, Settings(transformer_chunks=4, **knobs), device="cpu"), Results():
            assert tiny.relative_error(run(unet), plain) < 1e-5
    assert made[0] == made[1]


def attention_of(unet: Any) -> Any:
    return unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1


def test_what_is_merged_into_weights_acts(unet: Any) -> None:
    """In place, as a LoRA is fused, and by other contents, as it is fused safely: these are laid together anew."""
    attention = attention_of(unet)
    noise = torch.Generator().manual_seed(3)
    more = torch.randn(attention.to_v.weight.shape, generator=noise)
    plain = run(unet)
    with attached(unet, FUSED, device="cpu"):
        _, products = counted(lambda: run(unet))
        attention.to_v.weight.data += more
        in_place, after = counted(lambda: run(unet))
        assert after == products
        attention.to_k.weight.data = attention.to_k.weight.data + more
        both, after = counted(lambda: run(unet))
        assert after == products and held_bytes(unet) == weight_bytes(unet)
    expected = run(unet)
    assert tiny.relative_error(both, expected) < 1e-5
    attention.to_k.weight.data -= more
    assert tiny.relative_error(in_place, run(unet)) < 1e-5 < tiny.relative_error(in_place, plain)


def test_what_a_layer_does_to_its_weight_when_it_is_called_acts(unet: Any) -> None:
    """As a host that merges a LoRA then: values were made with the weight of before, and are made again."""
    values = attention_of(unet).to_v
    forward = values.forward

    def merging(x: torch.Tensor) -> torch.Tensor:
        if not merged:
            merged.append(True)
            values.weight.data.mul_(3)
            values.weight.mul_(1)
        return forward(x)

    results = []
    for settings in (Settings(), FUSED):
        merged: list[bool] = []
        values.forward = merging
        with attached(unet, settings, device="cpu"):
            results.append(run(unet))
        del values.forward
        values.weight.data.div_(3)
    assert tiny.relative_error(*results) < 1e-5 < tiny.relative_error(results[0], run(unet))


def test_attentions_of_another_build_are_left_alone_and_counted(unet: Any) -> None:
    attention = attention_of(unet)
    attention.to_k = torch.nn.Linear(attention.to_k.in_features, attention.to_k.out_features)
    attention.to_v = torch.nn.Linear(attention.to_v.in_features, attention.to_v.out_features)
    plain = run(unet)
    with (
        pytest.warns(UserWarning, match="fused_qkv: 1 of 32 attentions are left as they are"),
        attached(unet, FUSED, device="cpu") as attachment,
    ):
        assert attachment.sites["fused_qkv"] == 31 and tiny.relative_error(run(unet), plain) < 1e-5


def test_parts_of_a_larger_place_are_left_there(unet: Any) -> None:
    """Copies of them would be held beside what they are a part of."""
    attention = attention_of(unet)
    whole = torch.randn(5 * len(attention.to_q.weight), attention.to_q.in_features)
    for number, one in enumerate((attention.to_q, attention.to_k, attention.to_v)):
        one.weight.data = whole[2 * number * len(one.weight) :][: len(one.weight)]
    plain, products = counted(lambda: run(unet))
    with attached(unet, FUSED, device="cpu"):
        result, fewer = counted(lambda: run(unet))
        assert attention.to_v.weight.untyped_storage()._cdata == whole.untyped_storage()._cdata
    assert products - fewer == 48 - 2 and tiny.relative_error(result, plain) < 1e-5


def test_the_buffer_of_a_card_has_them_together_already(unet: Any) -> None:
    """There all weights of a component are parts of one place, in the order of its layers: nothing is copied."""
    plain, products = counted(lambda: run(unet))
    tensors = all_tensors(unet)
    for tensor, data in zip(tensors, _in_one_buffer([one.data for one in tensors], torch.device("cpu")), strict=True):
        set_data(tensor, data)
    places = [one.data_ptr() for one in tensors]
    with attached(unet, FUSED, device="cpu"):
        result, fewer = counted(lambda: run(unet))
        assert [one.data_ptr() for one in tensors] == places
    assert [one.data_ptr() for one in tensors] == places
    assert products - fewer == 48 and tiny.relative_error(result, plain) < 1e-5


def test_weights_of_a_file_are_the_files_again(unet: Any, tmp_path: Path) -> None:
    from diffusers import UNet2DConditionModel

    unet.save_pretrained(tmp_path)
    stored = UNet2DConditionModel.from_pretrained(tmp_path).eval()
    weights = [getattr(attention_of(stored), name).weight for name in ("to_q", "to_k", "to_v")]
    before = in_files(weights)
    plain = run(stored)
    with attached(stored, FUSED, device="cpu"):
        assert in_files(weights) == [False] * 3 and tiny.relative_error(run(stored), plain) < 1e-5
    assert in_files(weights) == before == [True] * 3
    assert torch.equal(run(stored), plain)


def test_gradients_go_the_models_own_way(unet: Any) -> None:
    weights = [getattr(attention_of(unet), name).weight.requires_grad_() for name in ("to_q", "to_k", "to_v")]
    with attached(unet, FUSED, device="cpu"):
        sample = torch.randn(1, 4, 16, 16)
        text = torch.randn(1, 7, unet.config.cross_attention_dim)
        unet(sample, torch.tensor(500), encoder_hidden_states=text).sample.sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in weights)


def test_a_plan_counts_the_operators_that_are_left(unet: Any) -> None:
    costs = Costs(anatomy_of(unet), Shape(64, 64), encodes=False, device=torch.device("cpu"))
    (step,) = costs.stages
    plain, fused = costs(step, Settings()), costs(step, FUSED)
    assert plain.operators - fused.operators == 48 and plain.flops == fused.flops


@pytest.mark.slow(5)
def test_a_plan_takes_it_where_it_is_asked_for() -> None:
    pipe = tiny.pipeline("sd15")
    size: dict[str, Any] = {"width": 64, "height": 64, "device": "cpu"}
    plain = tiny.run(pipe)
    without = plan(pipe, **size)
    assert without.settings.fused_qkv is None
    chosen = optimize(pipe, settings=FUSED, **size)
    try:
        assert chosen.settings.fused_qkv and chosen.settings.offload in (None, "none")
        assert str(chosen.fidelity) == "rounding"
        step, fused = (next(stage for stage in one.stages if stage.name == "denoise") for one in (without, chosen))
        assert fused.weights_bytes == step.weights_bytes
        assert tiny.relative_error(tiny.run(pipe), plain) < 1e-4
        with pytest.raises(SettingsError, match="compile='regional' cannot go with fused_qkv=True"):
            plan(pipe, settings=Settings(fused_qkv=True, compile="regional"), **size)
    finally:
        restore(pipe)


@pytest.mark.parametrize(
    "other", [{"offload": "layer"}, {"offload": "component"}, {"weight_storage": "int8"}, {"precision": "fp16-storage"}]
)
def test_refusals(unet: Any, other: dict[str, Any]) -> None:
    (named,) = other.items()
    message = f"fused_qkv cannot go with {named[0]}={named[1]!r}"
    with pytest.raises(SettingsError, match=message), attached(unet, Settings(fused_qkv=True, **other), device="cpu"):
        pass
    with pytest.raises(SettingsError, match=message):
        plan(unet, width=64, height=64, device="cpu", settings=Settings(fused_qkv=True, **other))


def test_where_nothing_can_be_fused() -> None:
    vae = build_components(tiny.config("sd15"), only=("vae",))["vae"]
    with pytest.raises(NoSiteError, match="no denoiser"), attached(vae, FUSED, device="cpu"):
        pass
