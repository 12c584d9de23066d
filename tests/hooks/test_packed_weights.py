"""Large convolutions on a CPU with weights in the order of its kernels: the same result; what has them made anew."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from diffusers import UNet2DConditionModel

from sd_lowvram import Settings, attached, plan, restore
from sd_lowvram.api import optimize
from sd_lowvram.compat.private import compiled_graphs
from sd_lowvram.errors import BudgetError, NoSiteError, SettingsError
from sd_lowvram.kernels import compiler, packed
from sd_lowvram.session import attach

CPU = torch.device("cpu")
PACKED = Settings(packed_weights=True)
pytestmark = pytest.mark.skipif(
    packed.why_not(torch.device("cpu")) is not None, reason=f"{packed.why_not(torch.device('cpu'))}"
)


@pytest.fixture(scope="module")
def unet() -> Any:
    """Return a model with four convolutions of 4 MiB and more, and smaller ones."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(32, 384),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        mid_block_type=None,
        cross_attention_dim=8,
        norm_num_groups=8,
        sample_size=16,
    ).requires_grad_(False)


def call(unet: Any, side: int = 16, batch: int = 2) -> torch.Tensor:
    noise = torch.Generator().manual_seed(0)
    sample, context = torch.randn(batch, 4, side, side, generator=noise), torch.randn(batch, 7, 8, generator=noise)
    return unet(sample, torch.tensor(500), encoder_hidden_states=context).sample


def test_the_same_result_and_all_of_it_undone(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = list[torch.Tensor]()
    pack = packed.pack
    monkeypatch.setattr(packed, "pack", lambda weight, *more: packs.append(weight) or pack(weight, *more))
    plain, larger = call(unet), call(unet, 64)
    with attached(unet, PACKED, device="cpu") as attachment:
        large = attachment.sites["packed_weights"]
        assert large == sum(weight.nbytes >= 4 << 20 and weight.dim() == 4 for weight in unet.parameters()) >= 4
        assert tiny.relative_error(call(unet), plain) < 1e-5
        first = len(packs)
        assert tiny.relative_error(call(unet), plain) < 1e-5 and len(packs) == first == large
        assert torch.equal(call(unet, 64), larger) and len(packs) == first, "maps of too many pixels"
        call(unet)
        first = len(packs)
        unet.down_blocks[1].resnets[0].conv2.weight.mul_(1.5)
        during = call(unet)
        assert len(packs) == first + 1, "weights that were written to"
    after = call(unet)
    unet.down_blocks[1].resnets[0].conv2.weight.div_(1.5)
    assert tiny.relative_error(during, after) < 1e-5 < tiny.relative_error(after, plain)
    assert not any("_conv_forward" in vars(module) for module in unet.modules())


def test_a_plan_takes_them_where_there_is_room(unet: Any) -> None:
    plain = call(unet)
    size = {"width": 128, "height": 128, "device": "cpu"}
    chosen = optimize(unet, vram="4GB", **size)
    try:
        assert chosen.settings.packed_weights is True and str(chosen.fidelity) == "rounding"
        assert tiny.relative_error(call(unet), plain) < 1e-5
    finally:
        restore(unet)
    assert torch.equal(call(unet), plain)
    without = plan(unet, vram="4GB", settings=Settings(packed_weights=False), **size)
    large = sum(weight.nbytes for weight in unet.parameters() if weight.dim() == 4 and weight.nbytes >= 4 << 20)
    assert 0.7 < (chosen.predicted.peak_bytes - without.predicted.peak_bytes) / large <= 1.01
    assert chosen.predicted.seconds < without.predicted.seconds
    assert plan(unet, vram="4GB", settings=PACKED, **size).settings.packed_weights is True
    tight = plan(unet, vram=f"{chosen.predicted.peak_bytes - 1} B", **size)
    assert not tight.settings.packed_weights


def test_a_plan_that_must_take_them_stores_nothing_in_bytes(unet: Any) -> None:
    asked: dict[str, Any] = {"width": 128, "height": 128, "device": "cpu", "settings": PACKED, "approximate": True}
    with pytest.raises(BudgetError) as told:
        plan(unet, vram="20MB", **asked)
    chosen = optimize(unet, vram=f"{told.value.needed_bytes} B", **asked)
    try:
        assert chosen.settings.packed_weights is True and chosen.settings.weight_storage is None
        assert call(unet, batch=1).isfinite().all()
    finally:
        restore(unet)


def test_gradients_go_the_models_own_way(unet: Any) -> None:
    with attached(unet, PACKED, device="cpu"):
        sample = torch.randn(1, 4, 16, 16, requires_grad=True)
        unet(sample, torch.tensor(500), encoder_hidden_states=torch.randn(1, 7, 8)).sample.sum().backward()
    assert sample.grad is not None


def test_refusals(unet: Any) -> None:
    with pytest.raises(NoSiteError, match="4 MiB"), attached(tiny.tiniest(), PACKED, device="cpu"):
        pass
    with (
        pytest.raises(SettingsError, match=r"packed_weights=True.*offload='layer'"),
        attached(unet, Settings(packed_weights=True, offload="layer"), device="cpu"),
    ):
        pass
    with pytest.raises(SettingsError, match="cuda"):
        attach(unet, PACKED, torch.device("cuda"))


@pytest.mark.slow(40)
@pytest.mark.skipif(compiler.why_not(CPU) is not None, reason=f"{compiler.why_not(CPU)}")
def test_compiled_blocks_take_them_and_share_their_code_as_before(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ran = call(unet), list[torch.Tensor]()
    convolve = packed.convolve
    monkeypatch.setattr(packed, "convolve", lambda x, copy, *more: ran.append(copy) or convolve(x, copy, *more))
    pieces = []
    for more, backend in (({}, "eager"), ({"packed_weights": True}, compiler.BACKEND)):  # both traced by dynamo
        monkeypatch.setattr(compiler, "BACKEND", backend)
        compiler.forget()
        before = compiled_graphs()
        settings = Settings(compile="regional", channels_last=True, **more)
        with torch.no_grad(), attached(unet, settings, device="cpu") as attachment:
            assert tiny.relative_error(call(unet), plain) < 1e-5
            pieces.append(compiled_graphs() - before)
            large = attachment.sites.get("packed_weights", 0)
            assert len(ran) == large
            if more:
                unet.down_blocks[1].resnets[0].conv2.weight.mul_(1.5)
                during = call(unet)
                assert len(ran) == 2 * large >= 8 and compiled_graphs() == before + pieces[-1]
    assert pieces[0] == pieces[1]
    after = call(unet)
    unet.down_blocks[1].resnets[0].conv2.weight.div_(1.5)
    assert tiny.relative_error(during, after) < 1e-5 < tiny.relative_error(after, plain)
