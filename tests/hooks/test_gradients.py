"""Where autograd follows a call, gradients are those of the plain model whatever is set, or they are refused."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import families
import pytest
import tiny
import torch
from gradients import WANTED, Case, every_knob, named, tolerance

from sd_lowvram import Settings, attached, optimize, plan, restore
from sd_lowvram.compat import computes_on_cpu
from sd_lowvram.errors import LowVRAMError
from sd_lowvram.kernels import compiler
from sd_lowvram.session import attachments
from sd_lowvram.settings import STREAMED
from sd_lowvram.weights import weight_bytes

_NO_UNET = {
    "feed_forward_chunks": "no feed-forward layer",
    "residual_strips": "no plain residual block",
    "transformer_chunks": "no transformer block",
    "park_skips": "no UNet",
    "guidance_in_turn": "no UNet",
    "weight_storage": "no UNet or text encoder",
    "deep_cache": "no UNet",
    "merge_tokens": "no transformer block",
    "traced": "no denoiser",
}
_ON_A_CPU = {
    "precision=tf32": "needs an NVIDIA GPU",
    "attention=efficient": "cannot run on cpu",
    "attention=triton": "cannot run on cpu",
    "attention=cudnn": "cannot run on cpu",
    "cuda_graphs": "NVIDIA GPUs",
    "streamed_graphs": "no weights are streamed",
    "packed_weights": "packed.weights: ",
    "winograd": "convolutions of 64 channels",
}
if not computes_on_cpu(torch.float16):
    _ON_A_CPU |= {f"precision={kind}": "cannot compute in" for kind in ("fp16", "autocast-fp16", "fp16-products")}
REFUSED: dict[str, dict[str, str]] = {
    "vae": _ON_A_CPU | _NO_UNET,
    "unet": _ON_A_CPU
    | {"precision=fp16-products": "is for transformers"}
    | dict.fromkeys(("vae_slices", "vae_tiles=exact", "vae_tiles=fast", "decoder_device=cpu"), "no autoencoder")
    | {"vae_fused_kernels": "no autoencoder"},
}
"""What is meant to be refused, of each model: a knob, or a value of one, and what the error says."""


@functools.cache
def model_of(part: str) -> Any:
    """One for all cases: each leaves it as it was."""
    return getattr(tiny.tiniest(), part)


def case_of(part: str, wanted: str) -> Case:
    return Case(part, wanted, model=model_of(part))


@functools.cache
def plain(part: str, wanted: str) -> list[torch.Tensor]:
    return case_of(part, wanted).gradients()


@functools.cache
def plain_output(part: str) -> torch.Tensor:
    return output(part)


@torch.no_grad()
def output(part: str) -> torch.Tensor:
    case = case_of(part, "inputs")
    return case.output(case.inputs, case.text, 500)


def check(case: Case, settings: Settings, expected: list[torch.Tensor]) -> None:
    """Hold the gradients of ``case`` as it is now against those of the plain model, or against what is computed."""
    found, allowed = case.gradients(before=settings.compile in (None, "off")), tolerance(settings)
    assert [one.dtype for one in found] == [leaf.dtype for leaf in case.weights or expected]
    together = [torch.cat([one.flatten().double() for one in each]) for each in (found, expected)]
    error = tiny.relative_error(*together)
    if allowed is not None:
        assert error <= allowed, case.wanted
        return
    if case.wanted == "inputs" and computes_in_float32(settings):
        slope, way = case.slope()
        assert (found[0] * way).sum().item() == pytest.approx(slope, rel=2e-2)
    assert error < 0.5, case.wanted


def computes_in_float32(settings: Settings) -> bool:
    return settings.precision in (None, "fp32", "fp16-storage")


@pytest.fixture
def compiled(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace graphs of compiled blocks, forward and backward, without a C++ compiler; test_compiled runs inductor."""
    if settings.compile in (None, "off"):
        yield
        return
    monkeypatch.setattr(compiler, "BACKEND", "aot_eager")
    compiler.compile_private.cache_clear()
    yield
    compiler.compile_private.cache_clear()


@pytest.mark.parametrize("settings", [*every_knob()], ids=named)
@pytest.mark.parametrize("part", REFUSED)
def test_gradients(part: str, settings: Settings, compiled: None) -> None:
    expected, before = {wanted: plain(part, wanted) for wanted in wanted_of(part, settings)}, plain_output(part)
    for wanted, gradients in expected.items():
        refusal = refused(part, settings, wanted)
        case = case_of(part, wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if refusal is None:
                with attached(case.model, settings, device="cpu"):
                    check(case, settings, gradients)
            else:
                with pytest.raises(LowVRAMError, match=refusal), attached(case.model, settings, device="cpu"):
                    case.gradients()
    assert torch.equal(output(part), before)


def wanted_of(part: str, settings: Settings) -> list[str]:
    """Names whose gradients are wanted: of a decode not the text, and not what crashes torch 2.13 itself (GroupNorm's
    backward on a CPU, channels last, by its weights alone)."""
    without = {"text", "some parameters" if settings.channels_last else ""} if part == "vae" else set()
    return [wanted for wanted in WANTED if wanted not in without]


def refused(part: str, settings: Settings, wanted: str) -> str | None:
    """Message of the error if these settings are meant to be refused, or None."""
    keys = [key for name, _, value in settings.decided() for key in (name, f"{name}={value}")]
    told = [REFUSED[part][key] for key in keys if key in REFUSED[part]]
    if not told and settings.weight_storage and "parameters" in wanted:
        return "weights of 8 bits get no gradients"
    return told[0] if told else None


@pytest.fixture(scope="module")
def unet() -> Any:
    return families.parts("sd15")["unet"]


def planned(unet: Any, wanted: str, vram: int, side: int, then: Callable[[Case], object]) -> list[str | None]:
    """Hold gradients with a plan for ``side`` and ``vram`` against those of the plain model; ``then`` happens between.

    Returns:
        How the plans before and after the call stream.
    """
    case = Case("unet", wanted, model=unet)
    expected = case.gradients()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = optimize(unet, vram=f"{vram} B", width=side, height=side, device="cpu")
            then(case)
            found = case.gradients()
        last = attachments(unet)[-1].plan
    finally:
        restore(unet)
    for one, other in zip(found, expected, strict=True):
        assert tiny.relative_error(one, other) <= 1e-4
    return [chosen.settings.offload, last.settings.offload]


def least(unet: Any, side: int) -> int:
    return plan(unet, vram="1GB", width=side, height=side, device="cpu").minimum_vram_bytes


@pytest.mark.parametrize("wanted", WANTED)
def test_a_plan_that_streams(wanted: str) -> None:
    case = Case("unet", wanted, model=families.parts("sd15")["unet"])
    expected = case.gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = optimize(case.model, vram="2MiB", width=128, height=128, device="cpu")
        assert chosen.settings.offload in STREAMED
        found = case.gradients()
    restore(case.model)
    for one, other in zip(found, expected, strict=True):
        assert tiny.relative_error(one, other) <= 1e-4


@pytest.mark.parametrize("wanted", WANTED)
def test_planned_anew_between_a_call_and_its_backward(unet: Any, wanted: str) -> None:
    def small(case: Case) -> None:
        with torch.no_grad():
            case.output(case.inputs[:, :, :8, :8], case.text, 900)

    ways = planned(unet, wanted, max(least(unet, 320), weight_bytes(unet) + (1 << 20)), 64, small)
    assert ways[0] in (None, "none") and ways[1] in STREAMED


def test_what_autograd_keeps_is_told_once() -> None:
    unet = tiny.tiniest().unet
    optimize(unet, vram="64MiB", width=64, height=64, device="cpu")
    given = torch.zeros(1, 4, 8, 8), torch.tensor(500), torch.zeros(1, 7, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            unet(*given)  # the remedy that the warning names
    with pytest.warns(UserWarning, match=r"UNet2DConditionModel.*on.*torch\.no_grad\(\)"):
        unet(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unet(*given)
