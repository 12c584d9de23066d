"""The VAE in bounded memory: exact tiles are the plain decode and encode, slices go one by one."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sd_lowvram import Settings, attached, decode, encode, trace
from sd_lowvram.checkpoints.architectures import build_components
from sd_lowvram.demo import MODEL_PATH
from sd_lowvram.memory.accounts import kernels_of
from sd_lowvram.progress import listen
from sd_lowvram.units import MIB

MAPS = ("held", "parked", "recomputed")
COLLAGE = Path(__file__).parents[1] / "data" / "collage.png"


def as_bytes(pixels: Tensor) -> Tensor:
    return (pixels / 2 + 0.5).clamp(0, 1).mul(255).round()


def compare(exact: Tensor, plain: Tensor) -> None:
    assert (exact - plain).abs().max() <= 1e-4
    apart = (as_bytes(exact) - as_bytes(plain)).abs()
    assert apart.max() <= 1
    assert (apart.amax(1) == 0).double().mean() >= 0.999


def differences(name: str, result: Tensor, plain: Tensor) -> str:
    apart = (as_bytes(result) - as_bytes(plain)).abs()
    wrong = (apart.amax(1) > 1).double().mean() * 100
    return f"{name:26} {apart.mean():8.4f} {int(apart.max()):5} {wrong:8.2f} %"


@functools.lru_cache
def full_size() -> nn.Module:
    return build_components("sd15", only=("vae",))["vae"]


@functools.lru_cache
def small() -> Any:
    return build_components(tiny.config("sd15"), only=("vae",))["vae"]


@functools.lru_cache
def full_size_plain() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents and pixels of no round size, with their plain decode and moments."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 13, 15, generator=generator)
    vae: Any = full_size()
    with torch.no_grad():
        pixels = vae.decode(latents).sample
        return latents, pixels, pixels.clamp(-1, 1), vae.encode(pixels.clamp(-1, 1)).latent_dist.parameters


@pytest.mark.slow(8)
def test_exact_on_a_full_size_autoencoder() -> None:
    """Decode one map; the cases below decode real pictures."""
    latents, plain, pixels, moments = full_size_plain()
    with attached(full_size(), Settings(vae_tiles="exact", vae_map="parked", vae_strip_mib=1)), torch.no_grad():
        vae: Any = full_size()
        compare(vae.decode(latents).sample, plain)
        assert (vae.encode(pixels).latent_dist.parameters - moments).abs().max() <= 1e-4


@functools.lru_cache
def collage() -> tuple[Any, Tensor, Tensor, Tensor]:
    """The demo autoencoder, a band of a real collage (higher than foreign tiles), its moments and their decode."""
    import numpy
    from diffusers import AutoencoderKL
    from PIL import Image

    vae = AutoencoderKL.from_pretrained(MODEL_PATH / "vae", torch_dtype=torch.float32).eval()
    middle = Image.open(COLLAGE).convert("RGB").crop((420, 320, 580, 1080))
    rows = torch.from_numpy(numpy.asarray(middle).copy())
    pixels = rows.permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        moments = vae.encode(pixels).latent_dist.parameters
        return vae, pixels, moments, vae.decode(moments[:, :4]).sample


@pytest.mark.parametrize("kind", MAPS)
def test_exact_on_real_pictures(kind: str) -> None:
    vae, pixels, moments, plain = collage()
    if kind == "recomputed":  # which takes long: of a part
        pixels = pixels[:, :, :320]
        with torch.no_grad():
            moments = vae.encode(pixels).latent_dist.parameters
            plain = vae.decode(moments[:, :4]).sample
    chosen = Settings(vae_tiles="exact", vae_map=kind, vae_strip_mib=1)
    compare(decode(vae, moments[:, :4], settings=chosen), plain)
    assert (encode(vae, pixels, settings=chosen) - moments).abs().max() <= 1e-4


@pytest.mark.slow(7)
def test_what_others_differ_by(capsys: Any) -> None:
    """Exact tiles must be nearer than diffusers' tiling."""
    vae, _, moments, plain = collage()
    latents = moments[:, :4]
    exact = decode(vae, latents, settings=Settings(vae_tiles="exact"))
    vae.enable_tiling()
    try:
        with torch.no_grad():
            theirs = vae.decode(latents).sample
    finally:
        vae.disable_tiling()
    with capsys.disabled():
        print(f"\n{'of 255, 160x760 pixels':26} {'mean':>8} {'most':>5} {'over 1':>10}")
        for name, result in (("exact tiles", exact), ("diffusers tiling", theirs)):
            print(differences(name, result, plain))
    errors = [(result - plain).abs().mean() for result in (exact, theirs)]
    assert errors[0] < errors[1] / 100


def test_a_black_picture_is_encoded_as_exactly_as_others() -> None:
    """Groups of one channel whose map is even are normalised by 1/sqrt(eps), and so is what a mean is off by: torch's
    own kernel, channels last, is off by more than one."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    two = "DownEncoderBlock2D", "UpDecoderBlock2D"
    vae = AutoencoderKL(3, 3, (two[0],) * 2, (two[1],) * 2, (32, 64), norm_num_groups=32).eval()
    black = torch.zeros(1, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        moments = encode(vae, black, settings=Settings(vae_tiles="exact", vae_strip_mib=1))
        truth: Any = copy.deepcopy(vae).double().encode(black.double())
    assert (moments - truth.latent_dist.parameters).abs().max() < 1e-3


@given(
    height=st.integers(2, 12),
    width=st.integers(2, 12),
    batch=st.integers(1, 2),
    kind=st.sampled_from(MAPS),
    last=st.booleans(),
    wraps=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_exact_at_every_size(height: int, width: int, batch: int, kind: str, last: bool, wraps: bool) -> None:
    vae = small()
    convolutions = [
        module for module in vae.modules() if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)
    ]
    latents = torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(height * width))
    if last:
        latents = latents.contiguous(memory_format=torch.channels_last)
    try:
        for convolution in convolutions:
            if wraps and convolution.stride == (1, 1):
                convolution.padding_mode = "circular"
                convolution._reversed_padding_repeated_twice = [1, 1, 1, 1]
        with torch.no_grad():
            pixels = vae.decode(latents).sample
            moments = vae.encode(pixels).latent_dist.parameters
            with attached(vae, Settings(vae_tiles="exact", vae_map=kind, vae_strip_mib=1)):
                assert tiny.relative_error(vae.decode(latents).sample, pixels) < 1e-5
                assert tiny.relative_error(vae.encode(pixels).latent_dist.parameters, moments) < 1e-4
    finally:
        for convolution in convolutions:
            convolution.padding_mode = "zeros"


def _traced(run: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float16, **chosen: Any) -> Any:
    vae = build_components("sd15", dtype=dtype, device="meta", only=("vae",))["vae"]
    x = torch.empty(shape, dtype=dtype, device="meta")
    with torch.no_grad(), attached(vae, Settings(**chosen)):
        return trace(getattr(vae, run), x, return_dict=False)


@pytest.mark.parametrize(("size", "bound"), [(1024, 128), (2048, 256), (4096, 768)])
def test_peak_of_parked_maps(size: int, bound: int, capsys: Any) -> None:
    for run, shape in (("decode", (1, 4, size // 8, size // 8)), ("encode", (1, 3, size, size))):
        traced = _traced(run, shape, vae_tiles="exact", vae_map="parked")
        with capsys.disabled():
            peak, host = traced.activation_peak_bytes / MIB, traced.host_peak_bytes / MIB
            print(f"\n{run} {size}, parked: {peak:.0f} MiB on the device, {host:.0f} MiB in host memory", end=" ")
        assert traced.activation_peak_bytes <= bound * MIB
        assert traced.host_peak_bytes > 0


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096])
def test_peak_of_held_and_recomputed_maps(size: int) -> None:
    plain = {512: 384, 1024: 1536, 2048: 6144, 4096: 24578}[size] * MIB
    for run, shape in (("decode", (1, 4, size // 8, size // 8)), ("encode", (1, 3, size, size))):
        held = _traced(run, shape, vae_tiles="exact", vae_map="held")
        assert held.activation_peak_bytes <= 0.55 * plain
        assert held.host_peak_bytes == 0
        if size <= 1024:
            untiled = _traced(run, shape)
            assert held.activation_peak_bytes <= 0.55 * untiled.activation_peak_bytes
            recomputed = _traced(run, shape, vae_tiles="exact", vae_map="recomputed")
            share = 0.6 if run == "decode" else 1.0  # an encoder's next level is as large as what recomputing saves
            assert recomputed.activation_peak_bytes <= share * held.activation_peak_bytes


@pytest.mark.parametrize("run", ["decode", "encode"])
@pytest.mark.parametrize(("size", "strip"), [(256, None), (512, 4)])
def test_where_a_cpu_computes_a_recomputed_map_takes_less_of_both_accounts(run: str, size: int, strip: Any) -> None:
    shape = (1, 4, size // 8, size // 8) if run == "decode" else (1, 3, size, size)
    exact: Any = {"vae_tiles": "exact", "vae_strip_mib": strip}
    with kernels_of("cpu"):
        parked = _traced(run, shape, torch.float32, vae_map="parked", **exact)
        recomputed = _traced(run, shape, torch.float32, vae_map="recomputed", **exact)
    assert recomputed.activation_peak_bytes < parked.activation_peak_bytes
    assert recomputed.allocated_peak_bytes < 0.75 * parked.allocated_peak_bytes


def test_slices_of_a_batch() -> None:
    latents = torch.randn(3, 4, 9, 11)
    with torch.no_grad():
        plain = small().decode(latents).sample
        with attached(small(), Settings(vae_slices=True)):
            assert tiny.relative_error(small().decode(latents).sample, plain) < 1e-5


def test_strips_are_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    with listen(lambda *report: seen.append(report)):
        decode(small(), torch.randn(1, 4, 8, 8), settings=Settings(vae_tiles="exact"))
    assert seen[-1] == ("decode", 1000, 1000)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_interrupting_a_decode_leaves_the_model_as_it_was() -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    latents = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        plain = small().decode(latents).sample
        with pytest.raises(KeyboardInterrupt), listen(stop):
            decode(small(), latents, settings=Settings(vae_tiles="exact"))
        assert torch.equal(small().decode(latents).sample, plain)
