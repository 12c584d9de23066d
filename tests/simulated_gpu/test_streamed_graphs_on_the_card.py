"""Steps with streamed weights that are recorded and replayed: the same bits and no race, however late copies run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from on_card import GPU
from run_log import logged
from test_hooks_on_the_card import LATE, LAYER, WAYS, Broken, denoise, mapped, run, timing_of
from test_unet_hosts import add_lora
from torch import Tensor

from sd_lowvram import Settings, attached
from sd_lowvram.streaming.copier import Copier

STEPS = 5
RECORDED = dataclasses.replace(WAYS["blocks"], streamed_graphs=True)


@pytest.fixture(scope="module")
def pipe(gpu: Any) -> Any:
    return families.plain("sd15")


@pytest.fixture(scope="module")
def wanted(pipe: Any) -> Tensor:
    with attached(pipe.unet, Settings(offload="none"), device=GPU):
        return denoise(pipe.unet, STEPS)


@pytest.mark.parametrize(
    ("schedule", "way"),
    [("eager", "blocks"), *((late, way) for late in LATE for way in ("blocks", "halves", "layer", "layers split"))],
)
def test_replayed_steps_have_the_same_bits(gpu: Any, pipe: Any, schedule: str, way: str) -> None:
    """The UNet is recorded anew in a second picture, as other models evict it between the two."""
    settings = WAYS[way]
    with attached(pipe, settings, device=GPU):
        picture = run(pipe, {}, STEPS)
    replays = gpu.card.replays
    with gpu.watched(schedule) as seen:
        with attached(pipe, dataclasses.replace(settings, streamed_graphs=True), device=GPU):
            first, second = (run(pipe, {}, STEPS) for _ in range(2))
        assert torch.equal(first, picture) and torch.equal(second, picture)
        assert gpu.card.replays - replays in (2 * STEPS - 2, 2 * STEPS - 3)  # the first picture may show another order
    assert seen.clean, seen


def test_copies_and_compute_of_a_recording_never_share_a_stream(
    gpu: Any, pipe: Any, wanted: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch hands out 32 streams in turn, so one of 32 recordings had its copies in line with its compute."""
    begin, record, shared = Copier.__init__, Copier.recorded, []

    def begins(copier: Copier, *args: Any) -> None:
        begin(copier, *args)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", copier._stream)

    @contextlib.contextmanager
    def records(copier: Copier) -> Iterator[None]:
        with record(copier):
            shared.append(copier._stream == torch.cuda.current_stream())
            yield

    monkeypatch.setattr(Copier, "__init__", begins)
    monkeypatch.setattr(Copier, "recorded", records)
    with attached(pipe.unet, RECORDED, device=GPU):
        assert torch.equal(denoise(pipe.unet, STEPS), wanted)
    assert shared == [False]


def fuse(pipe: Any) -> None:
    for module in pipe.unet.modules():
        if hasattr(module, "merged_adapters"):
            module.merge()


CHANGES: dict[str, Callable[[Any], None]] = {
    "scale": lambda pipe: pipe.unet.set_adapters(list(pipe.unet.peft_config), [0.25]),
    "fused": fuse,
    "written": lambda pipe: pipe.unet.conv_out.weight.data.copy_(pipe.unet.conv_out.weight.data * 2),
    "written, in view of torch": lambda pipe: pipe.unet.conv_in.weight.detach().mul_(2),
    "replaced": lambda pipe: setattr(pipe.unet.conv_in.weight, "data", pipe.unet.conv_in.weight.data * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_between_steps_is_recorded_anew(gpu: Any, change: str) -> None:
    def changed(settings: Settings) -> Tensor:
        pipe = families.plain("sd15")
        add_lora(pipe.unet)

        def changing(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if step == 4:
                CHANGES[change](pipe)
            return kept

        with attached(pipe, settings, device=GPU):
            return run(pipe, {"callback_on_step_end": changing}, 8)

    picture, replays = changed(WAYS["blocks"]), gpu.card.replays
    with gpu.watched("random") as seen:
        assert torch.equal(changed(RECORDED), picture)
    assert gpu.card.replays >= replays + 4
    assert not seen.races, seen


def test_another_stream_and_autograd_run_as_they_are(gpu: Any, pipe: Any, wanted: Tensor) -> None:
    other = torch.cuda.Stream()
    with gpu.watched("random") as seen, attached(pipe.unet, RECORDED, device=GPU):
        found = [denoise(pipe.unet, STEPS)]
        with torch.cuda.stream(other):
            found.append(denoise(pipe.unet, STEPS))
        latents = torch.ones(1, 4, 8, 8, device=GPU, requires_grad=True)
        text = torch.ones(1, 7, pipe.unet.config.cross_attention_dim, device=GPU)
        assert pipe.unet(latents, torch.tensor(5, device=GPU), text, return_dict=False)[0].requires_grad
        found.append(denoise(pipe.unet, STEPS))
        del latents, text
    assert all(torch.equal(one, wanted) for one in found)
    assert seen.clean, seen


@pytest.mark.parametrize("where", ["in a file", "with the activations"])
def test_what_cannot_be_recorded_is_told_and_runs_as_it_is(
    gpu: Any, pipe: Any, wanted: Tensor, where: str, tmp_path: Path
) -> None:
    replays = gpu.card.replays
    if where == "in a file":
        pipe.unet.save_pretrained(tmp_path)
        with logged("cannot be recorded"), mapped(tmp_path) as unet, attached(unet, RECORDED, device=GPU):
            found = denoise(unet, STEPS)
    else:
        settings = dataclasses.replace(LAYER, streamed_graphs=True)
        with logged("cannot be recorded"), attached(pipe.unet, settings, device=GPU, timing=timing_of(pipe.unet)):
            found = denoise(pipe.unet, STEPS)
    assert torch.equal(found, wanted) and gpu.card.replays == replays


def test_an_error_in_a_step_that_is_recorded(gpu: Any, pipe: Any, wanted: Tensor) -> None:
    """It reaches the caller, and later steps are recorded."""
    inner = pipe.unet.mid_block.forward

    def breaks(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise Broken
        return inner(*args, **kwargs)

    with gpu.watched("random") as seen, attached(pipe.unet, RECORDED, device=GPU):
        pipe.unet.mid_block.forward = breaks
        with pytest.raises(Broken):
            denoise(pipe.unet, STEPS)
        assert {tensor.device.type for tensor in pipe.unet.parameters()} == {"cpu"}
        del pipe.unet.mid_block.forward
        replays = gpu.card.replays
        assert torch.equal(denoise(pipe.unet, STEPS), wanted) and gpu.card.replays > replays
    assert seen.clean, seen


def test_recordings_are_freed_before_another_model_runs(gpu: Any, pipe: Any) -> None:
    def recorded_bytes() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))

    before = recorded_bytes()
    with attached(pipe, RECORDED, device=GPU):
        pipe("a", num_inference_steps=STEPS, width=64, height=64, output_type="latent")
        assert recorded_bytes() > before
        pipe.vae.decode(torch.zeros(1, 4, 8, 8, device=GPU))
        assert recorded_bytes() == before
