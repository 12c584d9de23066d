"""Passes that torch.jit.trace has written down: the same picture, what is traced anew, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import families
import pytest
import tiny
import torch
from run_log import logged, nothing_logged
from test_unet_hosts import add_lora

from sd_lowvram import Settings, attached, optimize, plan, restore
from sd_lowvram.errors import NoSiteError, SettingsError

TRACED = Settings(traced=True)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every pass that torch writes down, where none was stored."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", "")
    found: list[Any] = []
    trace = torch.jit.trace

    def counted(call: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(call)
        return trace(call, *args, **kwargs)

    monkeypatch.setattr(torch.jit, "trace", counted)
    yield found


def draw(pipe: Any, size: int = 64, steps: int = 4) -> torch.Tensor:
    seed = torch.Generator().manual_seed(0)
    return pipe(
        "a red apple", num_inference_steps=steps, width=size, height=size, generator=seed, output_type="pt"
    ).images


def test_optimised_run_and_restored(followed: list[Any]) -> None:
    pipe = families.plain("sd15")
    plain, wide = draw(pipe), draw(pipe, 72)
    chosen = optimize(pipe, width=64, height=64, device="cpu", settings=TRACED)
    assert chosen.settings.traced and str(chosen.fidelity) == "rounding"
    assert pipe._sd_lowvram[-1].sites["traced"] == 1
    with nothing_logged():
        assert tiny.relative_error(draw(pipe), plain) < 1e-5
        assert tiny.relative_error(draw(pipe), plain) < 1e-5
        assert len(followed) == 1, "three steps of the first picture, four of the second"
        assert tiny.relative_error(draw(pipe, 72), wide) < 1e-5
        assert len(followed) == 2
    restore(pipe)
    assert torch.equal(draw(pipe), plain) and len(followed) == 2


def test_a_lora_is_traced_anew_and_acts(followed: list[Any]) -> None:
    pipe = families.plain("sd15")
    before = draw(pipe)
    with attached(pipe, TRACED, device="cpu"):
        draw(pipe)
        add_lora(pipe.unet)
        with logged("traced: the model has changed, as by a LoRA"):
            during = draw(pipe)
        assert len(followed) == 2
        name = next(iter(pipe.unet.peft_config))
        pipe.unet.set_adapters([name], [0.25])
        with logged("the model has changed"):
            weaker = draw(pipe)
    assert tiny.relative_error(weaker, draw(pipe)) < 1e-5
    pipe.unet.set_adapters([name], [1.0])
    assert tiny.relative_error(during, draw(pipe)) < 1e-5 and tiny.relative_error(during, before) > 1e-4


def test_what_cannot_be_traced_runs_as_it_is(followed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = families.plain("sd15")
    plain = draw(pipe)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no way through")

    monkeypatch.setattr(torch.jit, "trace", failing)
    with attached(pipe, TRACED, device="cpu"):
        with logged("cannot be traced .no way through.. It runs as it is"):
            assert torch.equal(draw(pipe), plain)
        with nothing_logged():
            assert torch.equal(draw(pipe), plain)


def test_a_listener_inside_and_autocast_are_heeded(followed: list[Any]) -> None:
    pipe, seen = families.plain("sd15"), list[int]()
    hook = pipe.unet.mid_block.register_forward_hook(lambda *_: seen.append(1))
    with attached(pipe, TRACED, device="cpu"), logged("a foreign hook is on its layers"):
        draw(pipe)
    assert len(seen) == 4 and not followed
    hook.remove()
    given = torch.zeros(1, 4, 8, 8), torch.tensor(5), torch.ones(1, 7, pipe.unet.config.cross_attention_dim)
    with attached(pipe.unet, TRACED, device="cpu"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found = [pipe.unet(*given, return_dict=False)[0] for _ in range(3)]
    assert not followed and torch.equal(found[0], found[2])


def test_gradients_go_through(followed: list[Any]) -> None:
    unet = families.plain("sd15").unet.requires_grad_(True)
    given = torch.zeros(1, 4, 8, 8), torch.tensor(5), torch.ones(1, 7, unet.config.cross_attention_dim)
    with attached(unet, TRACED, device="cpu"):
        for _ in range(3):
            unet(*given).sample.sum().backward()
    assert not followed and unet.conv_in.weight.grad is not None


@pytest.mark.parametrize(
    "knobs",
    [{"compile": "regional"}, {"offload": "component"}, {"feed_forward_chunks": 2}],
)
def test_what_does_not_go_with_it_is_named(knobs: dict[str, Any]) -> None:
    name, value = next(iter(knobs.items()))
    with pytest.raises(SettingsError, match=f"{name}={value!r}"):
        plan(families.plain("sd15"), width=64, height=64, device="cpu", settings=TRACED.filled(**knobs))


def test_an_autoencoder_alone_has_none() -> None:
    with pytest.raises(NoSiteError), attached(families.plain("sd15").vae, TRACED, device="cpu"):
        pass
