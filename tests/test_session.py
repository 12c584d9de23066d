"""Attaching and restoring: nothing of ours stays, whatever happened in between."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from typing import Any

import families
import pytest
import tiny
import torch
from torch import nn

import sd_lowvram
from sd_lowvram import Settings, attached, weights
from sd_lowvram.errors import BadInputError, ConflictError, LowVRAMError, NoSiteError
from sd_lowvram.session import attach, attachments, detach
from sd_lowvram.streaming.host_weights import HostWeights

CPU = torch.device("cpu")
EVERYTHING = Settings(
    precision="fp16-storage",
    attention="sliced",
    attention_mib=1,
    channels_last=True,
    inference_mode=True,
    vae_slices=True,
    vae_tiles="exact",
    vae_map="parked",
    decoder_device="gpu",
    offload="layer",
)


def snapshot(pipe: Any) -> dict[str, Any]:
    """Class, every attribute, and the bits, types, strides and devices of all tensors of every module."""
    seen = {}
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            for path, module in component.named_modules():
                held = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
                seen[f"{name}.{path}"] = (type(module), held)
            for path, tensor in component.state_dict().items():
                seen[f"{name}:{path}"] = (tensor.dtype, tensor.device, tensor.stride(), tensor.clone())
    ours = [name for name in vars(pipe) if "lowvram" in name]  # the pipeline's own attributes change as it runs
    seen["pipe"] = (type(pipe), dict.fromkeys(ours))
    return seen


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, facts in before.items():
        if isinstance(facts[-1], torch.Tensor):
            assert facts[:-1] == after[name][:-1], name
            assert torch.equal(facts[-1], after[name][-1]), name
        else:
            assert facts[0] is after[name][0], name
            assert facts[1].keys() == after[name][1].keys(), name
            for key, value in facts[1].items():
                same = value is after[name][1][key] or value == after[name][1][key]
                assert same, f"{name}.{key}"


@pytest.fixture
def pipe() -> Any:
    return families.plain("sd15")


def test_restored_after_success(pipe: Any) -> None:
    before = snapshot(pipe)
    with attached(pipe, EVERYTHING) as attachment:
        tiny.run(pipe, steps=1)
        assert attachment.sites["attention"] >= 10
        assert vars(pipe)
    assert_same(before, snapshot(pipe))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.cuda.OutOfMemoryError])
@pytest.mark.parametrize("offload", ["component", "layer"])
def test_restored_after_an_error_inside_a_hook(
    pipe: Any, error: type[BaseException], offload: str, monkeypatch: Any
) -> None:
    before = snapshot(pipe)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise error("planted")
        return fetch(*args, **kwargs)

    fetch = HostWeights.copy_to
    monkeypatch.setattr(HostWeights, "copy_to", failing)
    attach(pipe, Settings(offload=offload, precision="bf16"), CPU)
    with pytest.raises(error, match="planted"):
        tiny.run(pipe, steps=1)
    sd_lowvram.restore(pipe)
    assert calls == 60
    assert_same(before, snapshot(pipe))


def test_usable_after_an_error(pipe: Any) -> None:
    expected = tiny.run(pipe, steps=1)
    with attached(pipe, Settings(offload="layer")):
        failing = pipe.unet.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny.run(pipe, steps=1)
        failing.remove()
        assert torch.equal(tiny.run(pipe, steps=1), expected)


def test_a_failing_hook_leaves_nothing(pipe: Any) -> None:
    before = snapshot(pipe)
    with pytest.raises(LowVRAMError):
        attach(pipe, Settings(channels_last=True, precision="tf32"), CPU)
    assert_same(before, snapshot(pipe))


def test_what_fails_while_it_is_attached_leaves_nothing(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out when the second of three models moves to host memory, with all hooks before it set."""
    before, add, calls = snapshot(pipe), HostWeights.add, []

    def full(*given: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("planted")
        add(*given)

    monkeypatch.setattr(HostWeights, "add", full)
    with pytest.raises(MemoryError, match="planted"):
        attach(pipe, Settings(attention="sliced", offload="layer"), CPU)
    assert_same(before, snapshot(pipe))


def test_optimize_twice_and_on_a_component(pipe: Any) -> None:
    before = snapshot(pipe)
    expected = tiny.run(pipe)
    sd_lowvram.optimize(pipe, vram="1GB", settings=Settings(offload="layer"))
    sd_lowvram.optimize(pipe, vram="1GB", settings=Settings(offload="component"))
    assert len(attachments(pipe)) == 1
    sd_lowvram.optimize(pipe.unet, vram="1GB", settings=Settings(attention="sliced"))
    assert tiny.relative_error(tiny.run(pipe), expected) < 1e-5
    sd_lowvram.restore(pipe)
    sd_lowvram.restore(pipe.unet)
    sd_lowvram.restore(pipe)
    assert_same(before, snapshot(pipe))


CONVERTING = [
    Settings(channels_last=True),
    Settings(precision="bf16"),
    Settings(precision="fp16-storage"),
    Settings(weight_storage="int8"),
    Settings(offload="none"),
    Settings(offload="component", decoder_device="cpu"),
    Settings(offload="layer", split_layers=True, channels_last=True),
]
"""All that give weights other contents."""


def kinds(pipe: Any) -> list[bool]:
    """Whether each weight is a tensor of inference mode."""
    return [tensor.is_inference() for tensor in weights.all_tensors(pipe.unet, pipe.vae, pipe.text_encoder)]


@pytest.mark.parametrize("settings", CONVERTING, ids=str)
@pytest.mark.parametrize("loaded_so", [False, True], ids=["ordinary", "of inference mode"])
def test_weights_stay_of_their_kind_within_inference_mode(settings: Settings, loaded_so: bool) -> None:
    """An ordinary tensor that is given contents of inference mode becomes one of these; the other way round, torch
    looks for a counter of writes that is not there."""
    with torch.inference_mode(loaded_so):
        pipe = families.plain("sd15")
    before, kind = snapshot(pipe), kinds(pipe)
    with torch.inference_mode(), attached(pipe, settings, device=CPU):
        assert torch.isfinite(tiny.run(pipe, steps=1)).all()
    assert_same(before, snapshot(pipe))
    assert kinds(pipe) == kind


@pytest.mark.parametrize("whole", [True, False], ids=["an output", "a tuple"])
def test_an_encoder_in_fp32_on_the_processor_returns_its_inputs_type(whole: bool) -> None:
    """Latents of another type would end the run at the denoiser's first layer, after a picture that is begun from."""
    pipe = families.plain("sd15").to(torch.float16)
    picture = torch.zeros(1, 3, 32, 32, dtype=torch.float16)
    with torch.no_grad(), attached(pipe, Settings(offload="component", decoder_device="cpu"), device=CPU):
        result = pipe.vae.encode(picture, return_dict=whole)
        latents = (result.latent_dist if whole else result[0]).sample()
    assert latents.dtype == torch.float16


def test_optimized_and_restored_within_inference_mode(pipe: Any) -> None:
    before = snapshot(pipe)
    with torch.inference_mode():
        fixed = Settings(channels_last=True)
        sd_lowvram.optimize(pipe, vram="1GB", width=64, height=64, device=CPU, settings=fixed)
        tiny.run(pipe, steps=1)
        sd_lowvram.restore(pipe)
    assert_same(before, snapshot(pipe))
    assert not any(kinds(pipe))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_attachments_come_off_in_any_order(pipe: Any, order: tuple[int, ...]) -> None:
    before = snapshot(pipe)
    expected = tiny.run(pipe, steps=1)
    settings = Settings(inference_mode=True), Settings(attention="sliced"), Settings(offload="layer")
    three = [attach(pipe, one, CPU) for one in settings]
    for place in order:
        detach(pipe, three[place])
        assert tiny.relative_error(tiny.run(pipe, steps=1), expected) < 1e-5
    assert_same(before, snapshot(pipe))


def test_a_foreign_patch_on_top_survives(pipe: Any) -> None:
    expected = tiny.run(pipe, steps=1)
    attachment = attach(pipe, Settings(inference_mode=True, offload="layer"), CPU)
    ours, calls = pipe.unet.forward, []
    pipe.unet.forward = lambda *args, **kwargs: (calls.append(1), ours(*args, **kwargs))[1]
    foreign = pipe.unet.forward
    detach(pipe, attachment)
    assert pipe.unet.forward is foreign
    assert torch.equal(tiny.run(pipe, steps=1), expected)
    assert calls == [1]
    assert not torch.is_inference(pipe.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 77, 32)).sample)


OUT_OF_SIGHT: dict[str, dict[str, Any]] = {
    "park_skips": {"park_skips": True},
    "residual_strips": {"residual_strips": 3},
    "transformer_chunks": {"transformer_chunks": 3},
    "guidance_in_turn": {"guidance_in_turn": True},
    "offload": {"offload": "layer"},
    "weight_storage": {"weight_storage": "int8"},
}


@pytest.mark.parametrize("compiled_first", [True, False], ids=["compiled first", "hooks first"])
@pytest.mark.parametrize("knob", OUT_OF_SIGHT)
def test_what_no_compiler_can_follow_runs_beside_torch_compile(knob: str, compiled_first: bool) -> None:
    """Uncompiled, and reported so."""
    unet = families.parts("sd15")["unet"].eval()
    size = ((2, 4, 8, 8), (2, 77, 32))
    latents, text = (torch.randn(one, generator=torch.Generator().manual_seed(3)) for one in size)

    def run() -> torch.Tensor:
        made: torch.Tensor = unet(latents, torch.tensor(5), encoder_hidden_states=text, return_dict=False)[0]
        return made

    with torch.no_grad(), contextlib.ExitStack() as taken_off:
        with attached(unet, Settings(**OUT_OF_SIGHT[knob]), device="cpu"):
            expected = run()
        if compiled_first:
            unet.compile(backend="eager")
        taken_off.enter_context(attached(unet, Settings(**OUT_OF_SIGHT[knob]), device="cpu"))
        if not compiled_first:
            unet.compile(backend="eager")
        with pytest.warns(UserWarning, match=f"uncompiled: .*{knob}"):
            assert torch.equal(run(), expected)
        assert torch.equal(run(), expected)


def test_copies_are_refused(pipe: Any) -> None:
    with attached(pipe, Settings(inference_mode=True)):
        for act in (copy.deepcopy, pickle.dumps):
            with pytest.raises(LowVRAMError, match="restore"):
                act(pipe.unet)
    copy.deepcopy(pipe.unet)


def test_a_dropped_target_is_freed(pipe: Any) -> None:
    local = families.plain("sd15")
    sd_lowvram.optimize(local, vram="1GB", settings=Settings(offload="component", vae_tiles="exact"))
    tiny.run(local, steps=1)
    gone = weakref.ref(local.unet), weakref.ref(local)
    del local
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("text_encoder", Settings(attention="sliced")),
        ("text_encoder", Settings(channels_last=True)),
        ("unet", Settings(vae_tiles="exact")),
        ("unet", Settings(vae_slices=True)),
        ("unet", Settings(decoder_device="cpu")),
    ],
)
def test_a_hook_without_a_site_raises(pipe: Any, part: str, settings: Settings) -> None:
    with pytest.raises(NoSiteError), attached(getattr(pipe, part), settings):
        pass


def test_two_that_replace_the_same_conflict(pipe: Any) -> None:
    before = snapshot(pipe)
    with attached(pipe, Settings(vae_tiles="exact")), pytest.raises(ConflictError, match="turn one of them off"):
        attach(pipe, Settings(vae_tiles="exact", inference_mode=True), CPU)
    assert_same(before, snapshot(pipe))


def test_accelerate_offload_is_refused(pipe: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(pipe.unet, execution_device=CPU)
    with pytest.raises(ConflictError, match="remove_all_hooks"):
        attach(pipe, Settings(offload="layer"), CPU)


@pytest.mark.parametrize("target", [None, 3, nn.Linear(2, 2), {"unet": 1}])
def test_unknown_targets_are_named(target: Any) -> None:
    with pytest.raises(BadInputError, match=type(target).__name__):
        sd_lowvram.optimize(target)
