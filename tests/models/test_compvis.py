"""Every hook on the real modules of CompVis' latent diffusion: which sites it hits, and that the result is the same."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import pytest
import test_unet_memory
import tiny
import torch
from test_unet_hooks import ALONE, SITES, everything_of
from torch import nn
from unet_bounds import BOUNDS, SMALLEST

import sd_lowvram
from sd_lowvram import Settings, attached
from sd_lowvram.errors import NoSiteError, UnsupportedModelError
from sd_lowvram.hooks import arguments
from sd_lowvram.memory import measured_peak
from sd_lowvram.models import calls_compvis
from sd_lowvram.models import compvis as family
from sd_lowvram.models.calls import Shape, denoise_step
from sd_lowvram.models.latents import latent_channels, scale_factor
from sd_lowvram.session import anatomy_of
from sd_lowvram.tracing import trace
from sd_lowvram.units import MIB

compvis = pytest.importorskip("compvis")
pytest.importorskip("ldm", reason="pip install --no-deps stable-diffusion-sdkit")

ATTENTION = {"attention": "fused-softmax", "attention_mib": 1}
HOOKS = {**ALONE, "attention": ATTENTION}
TOGETHER = {name: value for knobs in HOOKS.values() for name, value in knobs.items()}
HIT = {**SITES["sd15"], "attention": 32, "guidance_in_turn": 46, "park_skips": 46}


@functools.lru_cache
def unet_of(kind: str) -> Any:
    return compvis.unet(kind)


@functools.lru_cache
def vae() -> Any:
    return compvis.vae()


def run(unet: Any, size: tuple[int, int] = (24, 32), batch: int = 2) -> torch.Tensor:
    latents, timesteps, text = compvis.inputs(32, size, batch)
    with torch.no_grad():
        return unet(latents, timesteps, context=text)


@functools.lru_cache
def plain(kind: str, size: tuple[int, int] = (24, 32), batch: int = 2) -> torch.Tensor:
    return run(unet_of(kind), size, batch)


@pytest.mark.parametrize("hook", HOOKS)
def test_alone_the_same(hook: str) -> None:
    unet = unet_of("sd15")
    with attached(unet, Settings(**HOOKS[hook]), device="cpu") as attachment:
        result = run(unet)
    assert attachment.sites == {hook: HIT[hook]}
    assert tiny.relative_error(result, plain("sd15")) < 1e-5


@pytest.mark.parametrize("kind", compvis.KINDS)
@pytest.mark.parametrize(("size", "batch"), [((24, 32), 2), ((32, 16), 1), ((32, 16), 3)])
def test_together_the_same(kind: str, size: tuple[int, int], batch: int) -> None:
    unet = unet_of(kind)
    with attached(unet, Settings(**TOGETHER), device="cpu") as attachment:
        result = run(unet, size, batch)
    assert attachment.sites == HIT
    assert tiny.relative_error(result, plain(kind, size, batch)) < 1e-5
    assert torch.equal(run(unet, size, batch), plain(kind, size, batch))


def test_the_transformer_blocks_really_run_in_chunks() -> None:
    unet, rows = unet_of("sd15"), []
    query = unet.input_blocks[1][1].transformer_blocks[0].attn1.to_q
    handle = query.register_forward_pre_hook(lambda module, given: rows.append(given[0].shape[1]))
    with attached(unet, Settings(transformer_chunks=3), device="cpu"):
        run(unet)
    handle.remove()
    assert rows == [256] * 3


def test_circular_padding() -> None:
    unet = compvis.unet()
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
    expected = run(unet)
    assert tiny.relative_error(expected, plain("sd15")) > 1e-3
    with attached(unet, Settings(**TOGETHER), device="cpu"):
        assert tiny.relative_error(run(unet), expected) < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "fp16-storage"])
def test_narrow_types(precision: str) -> None:
    """Not farther from float32 than the same type alone. ldm's own attention cannot run in these types."""
    unet, errors, expected = unet_of("sd15"), [], plain("sd15")
    for knobs in ({"attention": "sdpa"}, TOGETHER):
        with attached(unet, Settings(precision=precision, **knobs), device="cpu"):
            errors.append(tiny.relative_error(run(unet).float(), expected))
    assert 0 < errors[1] < 1.1 * errors[0] + 1e-5
    assert torch.equal(run(unet), expected)


def test_tokens_that_somebody_else_mixes_are_not_divided() -> None:
    unet = compvis.unet()
    block = unet.input_blocks[1][1].transformer_blocks[0]
    assert family.transformer(block) is not None
    forward = block.attn1.forward
    block.attn1.forward = lambda x, **more: forward(x.flip(1), **more).flip(1)
    assert family.transformer(block) is None
    expected = run(unet)
    with attached(unet, Settings(transformer_chunks=3), device="cpu"):
        assert tiny.relative_error(run(unet), expected) < 1e-5
    block.attn1.forward = forward  # what hosts leave behind when they undo a patch
    assert family.transformer(block) is not None
    options = {"patches": {"attn1_patch": [print]}}
    assert family.transformer(block, None, {"patches_replace": {"attn2": {("input", 1): print}}}) is None
    assert family.transformer(block, None, options) is None and family.transformer(block, None, {}) is not None


def test_another_attention_is_chained() -> None:
    attention = unet_of("sd15").input_blocks[1][1].transformer_blocks[0].attn1
    x, seen = torch.randn(2, 30, 32), []

    def theirs(host: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs["transformer_options"])
        return 2 * host(*args, **kwargs)

    options = {"optimized_attention_override": theirs}
    bias = attention.to_out[0].bias
    once = family.attend(attention, None, x) - bias
    twice = family.attend(attention, None, x, transformer_options=options) - bias
    assert seen == [options] and tiny.relative_error(twice, 2 * once) < 1e-5


@pytest.mark.parametrize("heads_apart", [False, True])
def test_masks(heads_apart: bool) -> None:
    attention = unet_of("sd15").input_blocks[1][1].transformer_blocks[0].attn1
    noise = torch.Generator().manual_seed(1)
    x, keep = torch.randn(2, 30, 32, generator=noise), torch.rand(2, 30, generator=noise) > 0.3
    expected = attention(x, mask=keep)
    scores = torch.where(keep, 0.0, -torch.inf)[:, None].expand(2, 30, 30)
    mask = scores[:, None] if heads_apart else keep
    assert tiny.relative_error(family.attend(attention, None, x, mask=mask), expected) < 1e-5


def test_conditions_that_the_host_names_stay_with_their_part() -> None:
    options = {"transformer_index": 3, "cond_or_uncond": [1, 0, 0], "sigmas": torch.arange(6), "patches": {}}
    args, kwargs = (torch.zeros(6, 4, 8, 8), torch.arange(6)), {"transformer_options": options}
    assert arguments.batch_of(args, kwargs) == 6 and arguments.shares(args, kwargs, 6) == 3
    part, more = arguments.part_of(args, kwargs, 6, 2, 3)
    assert part[0].shape == (2, 4, 8, 8) and part[1].tolist() == [4, 5]
    mine = more["transformer_options"]
    assert mine["cond_or_uncond"] == [0] and mine["sigmas"].tolist() == [4, 5] and mine["patches"] is options["patches"]
    assert options["cond_or_uncond"] == [1, 0, 0]
    assert arguments.change_tensors(args, kwargs, lambda leaf: leaf)[1]["transformer_options"] is options
    assert arguments.shares((torch.zeros(4, 1, 1, 1),), {}, 4) == 2 and arguments.shares((), {}, 3) == 3


@pytest.mark.parametrize(
    ("name", "watched"), [("attn1_patch", True), ("attn2_output_patch", True), ("input_block_patch", False)]
)
def test_a_batch_whose_tokens_somebody_watches_is_known(name, watched) -> None:
    """ToMe draws what it merges once for all rows: guidance in turn leaves them together."""
    options = {"transformer_index": 0, "cond_or_uncond": [1, 0], "patches": {name: [print]}}
    assert arguments.are_watched((torch.zeros(2, 4, 8, 8),), {"transformer_options": options}) == watched
    assert not arguments.are_watched((torch.zeros(2, 4, 8, 8),), {"transformer_options": {**options, "patches": {}}})


LATENTS, PIXELS = (2, 4, 19, 13), (2, 3, 8 * 19, 8 * 13)


def both(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        pixels = vae.decode(torch.randn(LATENTS, generator=noise))
        return pixels, vae.encode(torch.randn(PIXELS, generator=noise)).parameters


@functools.lru_cache
def plainly() -> tuple[torch.Tensor, torch.Tensor]:
    return both(vae())


@pytest.mark.parametrize(
    ("settings", "sites"),
    [
        ({"vae_tiles": "exact", "vae_map": "held", "vae_strip_mib": 1}, {"vae_exact": 2}),
        ({"vae_tiles": "exact", "vae_map": "parked", "vae_strip_mib": 1}, {"vae_exact": 2}),
        ({"vae_tiles": "exact", "vae_map": "recomputed", "vae_strip_mib": 1}, {"vae_exact": 2}),
        ({"vae_slices": True}, {"vae_slices": 2}),
        (ATTENTION, {"attention": 2}),
    ],
)
def test_autoencoder(settings: dict[str, Any], sites: dict[str, int]) -> None:
    untouched = plainly()
    with attached(vae(), Settings(**settings), device="cpu") as attachment:
        result = both(vae())
    assert attachment.sites == sites
    for ours, expected in zip(result, untouched, strict=True):
        assert tiny.relative_error(ours, expected) < 1e-5


def test_decode_and_encode_within_a_budget() -> None:
    noise = torch.Generator().manual_seed(2)
    pixels = sd_lowvram.decode(vae(), torch.randn(LATENTS, generator=noise), device="cpu")
    moments = sd_lowvram.encode(vae(), torch.randn(PIXELS, generator=noise), device="cpu")
    for ours, expected in zip((pixels, moments), plainly(), strict=True):
        assert tiny.relative_error(ours, expected) < 1e-5


def test_decoders_of_another_build_are_refused() -> None:
    other = compvis.vae()
    other.decoder.tanh_out = True
    with pytest.raises(NoSiteError, match="AutoencoderKL"), attached(other, Settings(vae_tiles="exact")):
        pass


def test_a_shell_is_optimised_and_restored() -> None:
    shell = compvis.LatentDiffusion()
    before = everything_of(shell)
    anatomy = sd_lowvram.session.anatomy_of(shell)
    assert list(anatomy.components) == ["unet", "vae"] and len(anatomy.attentions) == 10
    expected = run(shell.model.diffusion_model)
    plan = sd_lowvram.optimize(shell, width=512, height=256, device="cpu")
    assert {stage.name for stage in plan.stages} == {"denoise", "decode"}
    assert tiny.relative_error(run(shell.model.diffusion_model), expected) < 1e-5
    sd_lowvram.restore(shell)
    assert everything_of(shell) == before


def test_what_hosts_keep_models_in() -> None:
    """ComfyUI's ModelPatcher and VAE and Forge's engines are no modules."""
    patcher = types.SimpleNamespace(model=types.SimpleNamespace(diffusion_model=unet_of("sd15")))
    holder = types.SimpleNamespace(first_stage_model=vae())
    engine = types.SimpleNamespace(forge_objects=types.SimpleNamespace(unet=patcher, vae=holder))
    found = [list(sd_lowvram.session.anatomy_of(target).components) for target in (patcher, holder, engine)]
    assert found == [["unet"], ["vae"], ["unet", "vae"]]
    latents = torch.randn(LATENTS, generator=torch.Generator().manual_seed(2))
    assert tiny.relative_error(sd_lowvram.decode(holder, latents, device="cpu"), plainly()[0]) < 1e-5
    expected = plain("sd15")  # before anything is attached
    with attached(engine, Settings(**TOGETHER), device="cpu"):
        assert tiny.relative_error(run(unet_of("sd15")), expected) < 1e-5
    assert list(vars(engine)) == ["forge_objects"]


def test_an_autoencoder_that_packs_its_latents_is_given_them_packed() -> None:
    """ComfyUI's of FLUX.2: its decoder sees four times as many latent pixels as its decode is given."""
    packed = _packed()
    latents = torch.randn(1, 16, 6, 4, generator=torch.Generator().manual_seed(0))
    anatomy = anatomy_of(packed)
    assert (scale_factor(anatomy), latent_channels(anatomy)) == (2 * scale_factor(anatomy_of(vae())), 16)
    with torch.no_grad():
        expected = packed.decode(latents)
    made = sd_lowvram.decode(packed, latents, settings=Settings(vae_tiles="exact", vae_strip_mib=1))
    assert tiny.relative_error(made, expected) < 5e-6
    side = scale_factor(anatomy)
    plan = sd_lowvram.plan(packed, vram="4GB", ram="4GB", width=4 * side, height=6 * side, device="cpu")
    peak = measured_peak(functools.partial(sd_lowvram.decode, packed, latents, settings=plan.settings))
    (stage,) = plan.stages
    assert 0.8 * stage.activation_bytes <= peak <= 1.02 * stage.activation_bytes + (64 << 10)


def _packed() -> Any:
    """One that takes latents of squares of 2x2, behind a batch norm."""
    made = compvis.vae()
    kind = type(made)

    def decode(self: Any, z: torch.Tensor) -> Any:
        spread = torch.sqrt(self.bn.running_var + self.bn.eps).view(1, -1, 1, 1)
        return kind.decode(self, nn.functional.pixel_shuffle(z * spread + self.bn.running_mean.view(1, -1, 1, 1), 2))

    made.__class__ = type("Packed", (kind,), {"decode": decode})
    made.bn = nn.BatchNorm2d(16, affine=False).eval()
    return made


def test_a_shell_of_another_denoiser_is_refused() -> None:
    shell = compvis.LatentDiffusion()
    shell.model.diffusion_model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"UNet.*\(unet: Linear\)"):
        sd_lowvram.plan(shell)


@functools.lru_cache
def full_unet() -> Any:
    return compvis.full_unet()


@pytest.mark.slow(9)
@pytest.mark.parametrize(("size", "batch"), [(512, 2), (4096, 2)])
def test_bounds(size: int, batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Traced on the full-size UNet of SD1.5 in fp16, and as much as on that of diffusers; its GroupNorm works in
    float32 whatever it is given."""
    unet, settings = full_unet(), dataclasses.replace(SMALLEST, precision="fp16")
    latents = torch.empty(batch, 4, size // 8, size // 8, dtype=torch.float16, device="meta")
    text = torch.empty(batch, 77, 768, dtype=torch.float16, device="meta")
    with attached(unet, settings, device="cpu"), torch.inference_mode():
        traced = trace(unet, latents, torch.empty(batch, device="meta"), context=text)
    with capsys.disabled():
        print(f"\nCompVis {size}x{size}, batch {batch}: {traced.activation_peak_bytes / MIB:.1f} MiB")
    assert traced.activation_peak_bytes <= BOUNDS[size]
    if size == 512:
        theirs = test_unet_memory.traced(SMALLEST, size, batch).activation_peak_bytes
        assert traced.activation_peak_bytes == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "beside", "labels"),
    [
        ({}, None, None),
        ({"in_channels": 9}, (2, 5, 8, 8), None),
        ({"in_channels": 8}, (2, 4, 8, 8), None),
        ({"in_channels": 7, "num_classes": 1000}, (2, 3, 8, 8), (2,)),
    ],
    ids=["plain", "inpainting", "instruct", "x4 upscaler"],
)
def test_a_step_is_called_with_what_the_unet_takes(changed: Any, beside: Any, labels: Any) -> None:
    anatomy = anatomy_of(compvis.unet(**changed))
    inputs = anatomy.family.step_inputs(anatomy, Shape(64, 64, batch=1, passes=2))
    shapes = [None if one is None else tuple(one.shape) for one in (inputs.beside, inputs.labels)]
    assert shapes == [beside, labels]
    assert inputs.latents.shape == (1, 4, 8, 8) and inputs.text.shape == (2, 77, 32)
    with torch.no_grad():
        assert denoise_step(anatomy.denoiser_module, inputs, anatomy.family.predict).shape == (1, 4, 8, 8)


def test_widths_are_those_of_the_layers_that_are_named_outermost_first() -> None:
    """A layer within blocks comes behind one outside them; queries take the model's own width."""
    block = nn.ModuleDict({"txt_mlp": nn.Linear(5, 6), "cross_attn": nn.ModuleDict({"to_q": nn.Linear(7, 6)})})
    module = nn.ModuleDict({"block": block, "txt_in": nn.Linear(3, 6), "other": nn.Linear(9, 6)})
    assert calls_compvis.input_widths(module, calls_compvis.TEXT) == [3, 5]
    assert calls_compvis.input_widths(module, calls_compvis.POOLED) == []
