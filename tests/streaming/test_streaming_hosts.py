"""What users do with a pipeline while its weights are streamed: nothing is lost, and the bits are those of a resident
run of the same pipeline."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from test_pipelines import _lora as lora_of
from test_plan_streaming import stream_of
from test_streaming import WAYS, run, unet_of
from test_unet_hosts import adapter, add_lora, controlnet

from sd_lowvram import Settings, attached
from sd_lowvram.errors import ConflictError
from sd_lowvram.patches import roles_of
from sd_lowvram.session import attach

STREAMED = {way: WAYS[way] for way in ("layer", "halves", "blocks")}
CPU = torch.device("cpu")


@pytest.mark.parametrize("way", STREAMED)
def test_lora_has_its_whole_effect(way: str) -> None:
    """Loaded before and after, scaled, unloaded, fused into the weights and taken out again: bit for bit."""
    pipe, twin = families.plain("sd15"), families.plain("sd15")
    lora = lora_of(pipe)
    without = tiny.run(twin, steps=1)

    def same(effect: bool, scale: float = 1.0) -> None:
        expected = tiny.run(twin, steps=1, cross_attention_kwargs={"scale": scale})
        assert torch.equal(tiny.run(pipe, steps=1, cross_attention_kwargs={"scale": scale}), expected)
        assert (tiny.relative_error(expected, without) > 1e-3) == effect

    def both(name: str, *args: Any, **kwargs: Any) -> None:
        for one in (pipe, twin):
            getattr(one, name)(*args, **kwargs)

    both("load_lora_weights", dict(lora), adapter_name="first")
    with attached(pipe, STREAMED[way], device="cpu"):  # loaded before
        same(True)
        same(True, scale=0.5)
        both("unload_lora_weights")
        same(False)
        both("load_lora_weights", dict(lora), adapter_name="second")  # loaded after
        both("set_adapters", ["second"], [0.5])
        same(True)
        both("fuse_lora")
        same(True)
        both("unfuse_lora")
        same(True)
        both("delete_adapters", "second")
        same(False)
    same(False)
    for module in pipe.unet.modules():
        assert not [key for key in vars(module) if "lowvram" in key or key == "forward"]


def test_lora_with_layers_split_by_rows() -> None:
    unet = unet_of("sd15")
    add_lora(unet)
    expected = run(unet, (8, 8))
    with attached(unet, Settings(offload="layer", split_layers=True), device="cpu"):
        assert tiny.relative_error(run(unet, (8, 8)), expected) < 1e-5


@pytest.mark.parametrize("way", ["little", "all stay"])
def test_weights_that_a_host_changes_inside_forward_are_kept(way: str) -> None:
    """AUTOMATIC1111 adds a LoRA to a layer's weight at its first call, and takes it for done at the next; another LoRA
    is added in a later step."""
    results = []
    for streamed in (False, True):
        unet, done = unet_of("sd15"), set()
        layers = [block.conv1 for block in (*unet.down_blocks[1].resnets, *unet.up_blocks[1].resnets)]
        before = run(unet, (8, 8))
        for layer in layers:
            _change_once(layer, done)
        with attached(unet, WAYS[way] if streamed else Settings(inference_mode=True), device="cpu"):
            results.append([run(unet, (8, 8)) for _ in range(3)])
            done.clear()
            results[-1] += [run(unet, (8, 8)) for _ in range(2)]
        assert len(done) == len(layers)
        results[-1].append(run(unet, (8, 8)))
        assert not torch.equal(results[-1][-1], before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _change_once(layer: Any, done: set[Any]) -> None:
    """Have the layer's forward write to its own weight, once."""
    conv = type(layer)._conv_forward

    def changed(x: torch.Tensor, _weight: torch.Tensor, bias: Any) -> torch.Tensor:
        if layer not in done:
            done.add(layer)
            with torch.no_grad():
                layer.weight += 0.125 * layer.weight.mean()
        return conv(layer, x, layer.weight, bias)

    layer._conv_forward = changed


@pytest.mark.parametrize("extra", [controlnet, adapter])
def test_residuals_from_outside(extra: Any) -> None:
    unet = families.parts("sd15")["unet"]  # as deep as the residuals are
    expected = run(unet, **extra())
    for way in ("layer", "little"):
        with attached(unet, WAYS[way], device="cpu"):
            assert torch.equal(run(unet, **extra()), expected)


def controlled() -> Any:
    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    parts = families.parts("sd15")
    net = ControlNetModel.from_unet(parts["unet"], conditioning_channels=3)
    noise = torch.Generator().manual_seed(4)
    for parameter in net.parameters():  # its zero convolutions would hide it
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=noise)
    pipe = StableDiffusionControlNetPipeline(**parts, controlnet=net, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("way", STREAMED)
def test_controlnet_shares_the_room_with_the_unet(way: str) -> None:
    pipe = controlled()
    options = {"image": torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))}
    expected = tiny.run(pipe, **options)
    with attached(pipe, STREAMED[way], device="cpu"):
        assert torch.equal(tiny.run(pipe, **options), expected)
        assert torch.equal(tiny.run(pipe, **options), expected)


def test_a_layer_is_streamed_again_when_its_lora_has_gone() -> None:
    """The LoRA's wrapper has taken its place in the list of layers, its patch is set again, and its memory is free."""
    unet = families.parts("sd15")["unet"]
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
    before = run(unet)
    with attached(unet, WAYS["layer"], device="cpu") as attachment:
        run(unet)
        streamed, weights = roles_of(layer), stream_of(attachment)._host_weights
        held = weights.host_bytes
        add_lora(unet)
        assert tiny.relative_error(run(unet), before) > 1e-3 and weights.host_bytes > held
        unet.unload_lora()
        gc.collect()
        assert torch.equal(run(unet), before) and weights.host_bytes == held
        assert unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q is layer
        assert streamed and roles_of(layer) == streamed


def test_ip_adapter_layers_are_streamed() -> None:
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    unet = unet_of("sd15")
    attention = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    attention.set_processor(IPAdapterAttnProcessor2_0(64, 32, num_tokens=(4,), scale=0.7))
    noise = torch.Generator().manual_seed(1)
    hidden, text, image = (torch.randn(shape, generator=noise) for shape in ((2, 16, 64), (2, 77, 32), (2, 1, 4, 32)))
    with torch.no_grad():
        expected = attention(hidden, (text, [image]))
        with attached(unet, WAYS["little"], device="cpu"):
            assert torch.equal(attention(hidden, (text, [image])), expected)


def test_textual_inversion_and_another_scheduler() -> None:
    from diffusers import EulerDiscreteScheduler

    pipe, twin = families.plain("sd15"), families.plain("sd15")
    token = {"<thing>": torch.randn(32, generator=torch.Generator().manual_seed(2))}
    with attached(pipe, WAYS["blocks"], device="cpu"):
        assert torch.equal(tiny.run(pipe), tiny.run(twin))
        for one in (pipe, twin):
            one.tokenizer = type(one.tokenizer).from_pretrained(tiny._folder("sd15") / "tokenizer")
            one.load_textual_inversion(dict(token), token="<thing>")
            one.scheduler = EulerDiscreteScheduler.from_config(one.scheduler.config)
        a, b = (one("a <thing>", num_inference_steps=2, width=64, height=64, output_type="pt",
                    generator=torch.Generator().manual_seed(3)).images for one in (pipe, twin))  # fmt: skip
        assert torch.equal(a, b)


def test_callbacks_may_change_weights_between_steps() -> None:
    pipe, twin = families.plain("sd15"), families.plain("sd15")

    def change(one: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            with torch.no_grad():
                for parameter in one.unet.mid_block.parameters():
                    parameter.mul_(1.25)
        return values

    expected = tiny.run(twin, steps=3, callback_on_step_end=change)
    with attached(pipe, WAYS["all stay"], device="cpu"):
        assert torch.equal(tiny.run(pipe, steps=3, callback_on_step_end=change), expected)


def _fuse(pipe: Any) -> None:
    pipe.fuse_lora()


def _interrupt(pipe: Any) -> None:
    pipe._interrupt = True


@pytest.mark.parametrize("way", ["all stay", *STREAMED])
@pytest.mark.parametrize("act", [_fuse, _interrupt])
def test_a_callback_may_fuse_a_lora_or_interrupt(way: str, act: Callable[[Any], None]) -> None:
    """Compare the run in which it happens, and the next one, with resident runs."""
    pipe, twin = families.plain("sd15"), families.plain("sd15")
    lora = lora_of(pipe)

    def after_the_first(one: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            act(one)
        return values

    for one in (pipe, twin):
        one.load_lora_weights(dict(lora), adapter_name="one")
    expected = [tiny.run(twin, steps=3, callback_on_step_end=after_the_first), tiny.run(twin, steps=2)]
    with attached(pipe, WAYS[way], device="cpu"):
        found = [tiny.run(pipe, steps=3, callback_on_step_end=after_the_first), tiny.run(pipe, steps=2)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("way", ["all stay", *STREAMED])
def test_a_callback_saves_whole_weights(way: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pipe = families.plain("sd15")
    weights = {name: tensor.clone() for name, tensor in pipe.unet.state_dict().items()}
    expected = tiny.run(families.plain("sd15"), steps=2)

    def save(one: Any, step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        one.unet.save_pretrained(tmp_path / str(step))
        return values

    with attached(pipe, WAYS[way], device="cpu"):
        assert torch.equal(tiny.run(pipe, steps=2, callback_on_step_end=save), expected)
    for step in range(2):
        saved = load_file(tmp_path / str(step) / "diffusion_pytorch_model.safetensors")
        assert saved.keys() == weights.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


def test_pipe_to_is_followed() -> None:
    """Another type needs another buffer."""
    pipe = families.plain("sd15")
    with attached(pipe, WAYS["blocks"], device="cpu"):
        tiny.run(pipe, steps=1)
        pipe.to(torch.bfloat16)
        streamed = tiny.run(pipe)
    assert torch.equal(tiny.run(pipe), streamed)
    assert {parameter.dtype for parameter in pipe.unet.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("way", STREAMED)
def test_what_is_saved_is_whole(way: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    unet = unet_of("sd15")
    weights = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    with attached(unet, STREAMED[way], device="cpu"):
        run(unet, (8, 8))
        unet.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks_are_compiled_once(when: str) -> None:
    from torch._dynamo.testing import CompileCounter

    unet = unet_of("sd15")
    expected = run(unet, (8, 8))
    blocks = [block for part in (unet.mid_block, unet.up_blocks[1]) for block in part.resnets]
    counter = CompileCounter()

    def compiled() -> None:
        for block in blocks:
            block.compile(backend=counter)

    torch._dynamo.reset()
    if when == "before":
        compiled()
    with attached(unet, WAYS["blocks"], device="cpu"):
        run(unet, (8, 8))
        if when == "after":
            compiled()
        assert tiny.relative_error(run(unet, (8, 8)), expected) < 1e-5
        run(unet, (8, 8))
        frames = counter.frame_count
        assert 0 < frames <= len(blocks)
        for _ in range(2):
            run(unet, (8, 8))
        assert counter.frame_count == frames
    torch._dynamo.reset()


def test_offloading_of_others_is_refused_with_the_remedy() -> None:
    unet = unet_of("sd15")
    unet.enable_group_offload(onload_device=CPU, offload_type="leaf_level")
    with pytest.raises(ConflictError, match="enable_group_offload"):
        attach(unet, WAYS["blocks"], CPU)
