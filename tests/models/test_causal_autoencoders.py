"""The autoencoders of Qwen-Image and Wan decode and encode exactly, within what was planned, frames and pictures."""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sd_lowvram
from sd_lowvram import Settings, attached, decode, encode
from sd_lowvram.errors import BadInputError, BudgetError, NoSiteError, NotFiniteError
from sd_lowvram.kernels.cpu_convolutions import convolve_like_whole, runs_onednn
from sd_lowvram.memory import measured_peak
from sd_lowvram.models.latents import latent_channels, pixel_channels, scale_factor
from sd_lowvram.session import attachments
from sd_lowvram.units import KIB, MIB
from tests.support.hosted_frames import HostedFrames, HostedPictures

_SMALL: dict[str, Any] = {"z_dim": 16, "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
_SQUARES = {"is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen": (diffusers.AutoencoderKLQwenImage, {"base_dim": 16, "dim_mult": [1, 2, 4, 4]}),
    "qwen, of diffusers' tests": (diffusers.AutoencoderKLQwenImage, {"base_dim": 12, "dim_mult": [1, 2, 4]}),
    "wan": (diffusers.AutoencoderKLWan, {"base_dim": 3, "dim_mult": [1, 1, 1, 1]}),
    "wan 2.2": (diffusers.AutoencoderKLWan, {"base_dim": 3, "dim_mult": [1, 1, 1, 1], **_SQUARES}),
}
if hasattr(diffusers, "AutoencoderKLQwenImage21"):  # from 0.42 on
    _PICTURES = {"base_dim": 3, "dim_mult": [1, 1, 2, 2], **_SQUARES}
    KINDS["qwen 2.1, pictures alone"] = (diffusers.AutoencoderKLQwenImage21, _PICTURES)
SIZES = [(1, 13, 11), (2, 5, 6)]
"""Frames, height and width of latents: a picture, and frames of which the plain decode makes five."""
RUNS = [(kind, size) for kind in KINDS for size in SIZES[: 1 if "alone" in kind else 2]]


@functools.lru_cache
def small(kind: str) -> Any:
    cls, sizes = KINDS[kind]
    levels = len(sizes["dim_mult"]) - 1
    torch.manual_seed(0)
    return cls(**_SMALL | {"temperal_downsample": [False, True, True][-levels:]} | sizes).eval().requires_grad_(False)


@functools.lru_cache
def plain(kind: str, *size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, their plain decode, and its moments."""
    latents = torch.randn(1, 16, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        pixels = small(kind).decode(latents).sample
        return latents, pixels, small(kind).encode(pixels).latent_dist.parameters


def factor(kind: str) -> int:
    return 2 ** (len(KINDS[kind][1]["dim_mult"]) - 1) * KINDS[kind][1].get("patch_size", 1)


def error(made: Tensor, wanted: Tensor) -> float:
    assert made.shape == wanted.shape and made.dtype == wanted.dtype
    return float((made - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("kind", "size"), RUNS)
def test_exact_strips_are_the_plain_decode_and_encode(kind: str, size: tuple[int, ...]) -> None:
    latents, pixels, moments = plain(kind, *size)
    assert pixels.shape[2] == 1 + (size[0] - 1) * 2 ** sum(small(kind).config.temperal_downsample)
    chosen = Settings(vae_tiles="exact", vae_strip_mib=1)
    assert error(decode(small(kind), latents, settings=chosen), pixels) <= 5e-6
    assert error(encode(small(kind), pixels, settings=chosen), moments) <= 5e-6


@pytest.mark.parametrize("spelt", ["temperal_downsample", "temporal_downsample"])
@pytest.mark.parametrize("size", SIZES)
def test_as_a_host_holds_them(size: tuple[int, ...], spelt: str) -> None:
    """ComfyUI's names and convolutions, and Forge Neo's: what it decodes is cut off nowhere, and of moments it takes
    the means."""
    vae: Any = HostedFrames(small("qwen"))
    setattr(vae, spelt, vars(vae).pop("temperal_downsample"))
    latents, pixels, moments = plain("qwen", *size)
    chosen = Settings(vae_tiles="exact", vae_strip_mib=1)
    anatomy = sd_lowvram.session.anatomy_of(vae)
    assert (scale_factor(anatomy), latent_channels(anatomy), pixel_channels(anatomy)) == (8, 16, 3)
    before = dict(vars(vae))
    assert error(decode(vae, latents, settings=chosen).clamp(-1, 1), pixels) <= 5e-6
    assert error(encode(vae, pixels, settings=chosen), moments) <= 5e-6
    with attached(vae, Settings(vae_tiles="exact", vae_slices=True)), torch.no_grad():
        made = vae.decode(torch.cat([latents, latents]))
        assert error(made[1:].clamp(-1, 1), pixels) <= 5e-6
        assert error(vae.encode(pixels), moments.chunk(2, dim=1)[0]) <= 5e-6
    assert vars(vae) == before


def test_as_forge_neo_holds_the_one_for_pictures() -> None:
    """Its convolutions are of the plane, and it takes latents with a frame and without."""
    vae: Any = HostedPictures(small("qwen"))
    latents, pixels, moments = plain("qwen", *SIZES[0])
    anatomy = sd_lowvram.session.anatomy_of(vae)
    assert (scale_factor(anatomy), latent_channels(anatomy), pixel_channels(anatomy)) == (8, 16, 3)
    before = dict(vars(vae))
    with torch.no_grad():
        assert error(vae.decode(latents), pixels) <= 5e-6  # the support's own plain forward
    asked = {"width": 8 * SIZES[0][2], "height": 8 * SIZES[0][1], "device": "cpu", "ram": "1GB"}
    least = sd_lowvram.plan(vae, vram="1GB", **asked).minimum_vram_bytes
    for budget in (least, 1 << 30):
        made = sd_lowvram.optimize(vae, vram=f"{budget} B", **asked)
        with sd_lowvram.measured(vae) as run, torch.no_grad():
            assert error(vae.decode(latents), pixels) <= 5e-6
        assert run.peak_bytes <= 1.02 * (made.predicted.peak_bytes + made.predicted.host_bytes) + 2 * MIB
        sd_lowvram.restore(vae)
    with attached(vae, Settings(vae_tiles="exact", vae_strip_mib=1, vae_slices=True)) as attachment, torch.no_grad():
        assert attachment.sites["vae_exact"] == 2
        assert error(vae.decode(torch.cat([latents, latents]).squeeze(2))[1:], pixels.squeeze(2)) <= 5e-6
        assert error(vae.encode(pixels), moments.chunk(2, dim=1)[0]) <= 5e-6
    assert vars(vae) == before


@pytest.mark.parametrize(("kind", "size"), [run for run in RUNS if run[0] not in ("qwen, of diffusers' tests", "wan")])
def test_several_budgets(kind: str, size: tuple[int, ...]) -> None:
    latents, pixels, _ = plain(kind, *size)
    vae, before = small(kind), dict(vars(small(kind)))
    asked = {"width": size[2] * factor(kind), "height": size[1] * factor(kind), "device": "cpu", "ram": "1GB"}
    least = sd_lowvram.plan(vae, vram="1GB", **asked).minimum_vram_bytes
    for budget in (least, 2 * least, 1 << 30):
        made = sd_lowvram.optimize(vae, vram=f"{budget} B", **asked)
        assert made.settings.vae_tiles == "exact" and made.predicted.peak_bytes <= budget
        with sd_lowvram.measured(vae) as run, torch.no_grad():
            assert error(vae.decode(latents[:, :, :1]).sample, plain(kind, *size)[1][:, :, :1]) <= 5e-6
        predicted = made.predicted.peak_bytes + made.predicted.host_bytes  # on a CPU the device is host memory too
        assert run.peak_bytes <= 1.02 * predicted + 2 * MIB
        sd_lowvram.restore(vae)
    assert not attachments(vae) and vars(vae) == before
    with torch.no_grad():
        assert torch.equal(vae.decode(latents).sample, pixels)
    with pytest.raises(BudgetError, match="decode"):
        decode(vae, latents, vram=f"{least // 4} B", ram="1GB")


@torch.no_grad()
def test_frames_that_the_model_refuses_are_refused_as_by_it() -> None:
    kind = next((kind for kind in KINDS if "alone" in kind), None)
    if kind is None:
        pytest.skip("diffusers has no Qwen-Image 2.1")
    frames = torch.zeros(1, 16, *SIZES[1])
    with pytest.raises((RuntimeError, ValueError)) as refused:
        small(kind).decode(frames)
    with pytest.raises(refused.type) as again, attached(small(kind), Settings(vae_tiles="exact")):
        small(kind).decode(frames)
    assert str(again.value) == str(refused.value)


@pytest.mark.parametrize("mib", [None, 1])
@pytest.mark.parametrize("kind", ["qwen", "wan"])
def test_frames_are_planned(kind: str, mib: int | None) -> None:
    """More frames than planned are planned anew; what they take is what was planned."""
    vae, chosen = small(kind), Settings(vae_tiles="exact", vae_strip_mib=mib)
    latents, pixels, _ = plain(kind, 2, 5, 6)
    first = sd_lowvram.optimize(vae, vram="1GB", ram="1GB", width=48, height=40, device="cpu", settings=chosen)
    try:
        with torch.no_grad():
            made = vae.decode(latents).sample
            peak = measured_peak(functools.partial(vae.decode, latents))
        assert error(made, pixels) <= 5e-6
        now = attachments(vae)[-1].plan
    finally:
        sd_lowvram.restore(vae)
    assert (first.request.frames, now.request.frames) == (1, 2)
    (stage,) = now.stages
    assert peak <= 1.02 * stage.activation_bytes + 64 * KIB
    assert peak >= 0.9 * stage.activation_bytes


@torch.no_grad()
def test_pictures_of_a_batch_one_at_a_time() -> None:
    vae, chosen = small("qwen"), Settings(vae_tiles="exact", vae_slices=True)
    latents = torch.randn(2, 16, 2, 5, 6)
    wanted = torch.cat([vae.decode(one).sample for one in latents.split(1)])
    assert error(decode(vae, latents, settings=chosen), wanted) <= 5e-6
    assert error(decode(vae, latents, settings=Settings(vae_tiles="off", vae_slices=True)), wanted) <= 5e-6
    assert not vae.use_slicing


def test_gradients_flow_as_without_it() -> None:
    vae = small("qwen")
    wanted, given = (
        torch.randn(1, 16, 1, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in "12"
    )
    vae.decode(wanted).sample.sum().backward()
    with attached(vae, Settings(vae_tiles="exact")):
        vae.decode(given).sample.sum().backward()
    assert wanted.grad is not None and given.grad is not None and torch.equal(given.grad, wanted.grad)


@torch.no_grad()
def test_in_bfloat16_the_bits_are_the_plain_ones() -> None:
    if not runs_onednn(torch.bfloat16):
        pytest.skip("oneDNN has no bfloat16 here: torch's own kernel rounds strips otherwise")
    torch.manual_seed(0)
    vae: Any = diffusers.AutoencoderKLQwenImage(base_dim=32, **_SMALL).to(torch.bfloat16).eval()
    latents = torch.randn(1, 16, 1, 13, 11).to(torch.bfloat16)
    try:
        wanted = vae.decode(latents).sample
    except RuntimeError as refused:  # on a processor with AVX10 that is limited to AVX2
        assert "pack_vnni2" in str(refused)
        pytest.skip(f"torch's own attention does not run here: {refused}")
    assert error(decode(vae, latents, settings=Settings(vae_tiles="exact", vae_strip_mib=1)), wanted) <= 1e-2
    assert torch.equal(decode(vae, latents, settings=Settings(vae_tiles="exact")), wanted)


@torch.no_grad()
def test_maps_that_onednn_takes_whole_have_the_plain_bits_by_strips() -> None:
    """Their strips are small enough to be unfolded, which sums in another order. Where oneDNN's kernel itself sums a
    strip in another order than the map, the result is equal up to rounding: so it is where threads share a map."""
    torch.manual_seed(0)
    frame, weight = torch.randn(1, 64, 122, 8), torch.randn(64, 64, 3, 3, 3)
    frames = torch.stack([torch.zeros_like(frame), torch.zeros_like(frame), frame], 2)
    strip = convolve_like_whole(frames.shape, frame[..., 8:25, :], weight[:, :, -1])
    in_order = torch.equal(strip, F.conv3d(frames, weight)[:, :, 0, 8:23])
    vae: Any = diffusers.AutoencoderKLQwenImage(base_dim=64, **_SMALL, dim_mult=[1, 1, 1, 1]).eval()
    latents = torch.randn(1, 16, 1, 120, 6)
    chosen = Settings(vae_tiles="exact", vae_strip_mib=2)
    pixels = vae.decode(latents).sample
    strips = decode(vae, latents, settings=chosen)
    assert error(strips, pixels) <= 5e-6
    assert torch.equal(strips, pixels) or not in_order or torch.get_num_threads() > 1


@torch.no_grad()
def test_what_is_no_numbers_is_refused() -> None:
    torch.manual_seed(0)
    vae: Any = diffusers.AutoencoderKLWan(**_SMALL, **KINDS["wan"][1]).eval()
    latents, chosen = torch.randn(1, 16, 1, 5, 6), Settings(vae_tiles="exact")
    with pytest.raises(NotFiniteError, match="its input has NaN"):
        decode(vae, latents * torch.inf, settings=chosen)
    vae.decoder.conv_out.bias.fill_(torch.nan)
    for tiles in ("exact", "off"):
        with pytest.raises(NotFiniteError, match="float32"):
            decode(vae, latents, settings=Settings(vae_tiles=tiles))


def test_what_does_not_suit_is_refused_by_name() -> None:
    vae = small("qwen")
    for latents in (torch.zeros(1, 16, 8, 8), torch.zeros(1, 4, 1, 8, 8), torch.zeros(1, 16, 0, 8, 8)):
        with pytest.raises(BadInputError, match=r"\(N, 16.*width\)"):
            decode(vae, latents)
    torch.manual_seed(0)
    other: Any = diffusers.AutoencoderKLWan(**_SMALL, **KINDS["wan"][1]).eval()
    other.decoder.up_blocks[0].resnets[0].nonlinearity = nn.GELU()
    with pytest.raises(NoSiteError), attached(other, Settings(vae_tiles="exact")):
        pass


@torch.no_grad()
def test_tiling_that_is_asked_for_later_is_not_laid_on_top() -> None:
    vae = small("qwen")
    latents, pixels, _ = plain("qwen", 1, 13, 11)
    with attached(vae, Settings(vae_tiles="exact")), pytest.warns(UserWarning, match="ignored"):
        vae.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=32)
        assert error(vae.decode(latents).sample, pixels) <= 5e-6
    assert not vae.use_tiling


@torch.no_grad()
def test_weights_are_streamed_whole_and_in_parts() -> None:
    torch.manual_seed(0)
    sizes = {"base_dim": 64, "dim_mult": [1, 4], "temperal_downsample": [True]}
    vae: Any = diffusers.AutoencoderKLWan(**_SMALL | sizes).eval()
    latents = torch.randn(1, 16, 2, 5, 4)
    pixels = vae.decode(latents).sample
    assert max(tensor.nbytes for tensor in vae.parameters()) > 6 * MIB
    for more in ({}, {"split_layers": True, "weights_mib": 2}):
        with attached(vae, Settings(vae_tiles="exact", offload="layer", **more), device="cpu"):
            assert error(vae.decode(latents).sample, pixels) <= 5e-6


@pytest.mark.parametrize(
    ("cls", "most"), [(diffusers.AutoencoderKLQwenImage, 1024), (diffusers.AutoencoderKLWan, 1024)]
)
def test_full_size_at_2048(cls: type, most: int) -> None:
    """MiB on a card, the weights among them; the plain decode takes 16 GiB."""
    with torch.device("meta"):
        vae = cls().to(torch.bfloat16).eval()
    size = {"width": 2048, "height": 2048, "device": "cpu", "ram": "64GB"}
    exact = sd_lowvram.plan(vae, vram="64GB", **size, settings=Settings(vae_tiles="exact"))
    whole = sd_lowvram.plan(vae, vram="64GB", **size, settings=Settings(vae_tiles="off"))
    assert exact.predicted.peak_bytes <= most * MIB < 8 * most * MIB < whole.predicted.peak_bytes
    assert exact.predicted.seconds < whole.predicted.seconds
