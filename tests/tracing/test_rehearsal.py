"""Rehearsals: a pipeline's own call on fake models records the calls of a real run, and touches nothing."""

from __future__ import annotations

import threading
from typing import Any

import families
import pytest
import rehearsed
import tiny
import todays
import torch
from rehearsed import KINDS, TwoExperts
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import sd_lowvram
from sd_lowvram.compat.private import FakeTensor, FakeTensorMode
from sd_lowvram.memory import measured_peak
from sd_lowvram.models.recorded import row_of
from sd_lowvram.tracing import values
from sd_lowvram.tracing.rehearsal import rehearse

STEPS = 3


def state(pipe: Any) -> Any:
    """The state that a rehearsal must not change: objects, types, places and bits of all weights, attributes, hooks."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    tensors = [
        (name, path, id(tensor), tensor.data_ptr(), tensor.dtype, tensor._version)
        for name, part in parts.items()
        for path, tensor in (*part.named_parameters(), *part.named_buffers())
    ]
    modules = [
        (id(module), sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for part in parts.values()
        for module in part.modules()
    ]
    scheduler = getattr(pipe, "scheduler", None)
    steps = repr(getattr(scheduler, "timesteps", None)), getattr(scheduler, "num_inference_steps", None)
    return tensors, modules, sorted(vars(pipe)), steps, torch.random.get_rng_state().tolist()


@pytest.mark.slow(60)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rehearsal_records_the_calls_of_a_real_run(kind: str, dtype: torch.dtype) -> None:
    make, call_of = KINDS[kind]
    pipe = make().to(dtype)
    call = {**rehearsed.narrowed(call_of(pipe), dtype), "num_inference_steps": STEPS, "output_type": "pt"}
    before = state(pipe)
    record = rehearse(pipe, **call)
    assert state(pipe) == before
    assert rehearsed.rehearsal(record) == rehearsed.real(pipe, **call)
    assert record.denoiser in ("unet", "transformer") and record.counts[record.denoiser] >= STEPS - 1


def test_the_autoencoder_is_rehearsed_in_the_type_that_it_is_widened_to() -> None:
    pipe = tiny.pipeline("sdxl").to(torch.float16)
    pipe.vae.register_to_config(force_upcast=True)
    call = {"prompt": "a", "width": 64, "height": 64, "num_inference_steps": 2, "output_type": "pt"}
    before = state(pipe)
    record = rehearse(pipe, **call)
    (decode,) = (row for row in record.rows if row.method == "decode")
    assert decode.args[0].dtype == decode.dtype == torch.float32
    assert state(pipe) == before and rehearsed.rehearsal(record) == rehearsed.real(pipe, **call)


def test_an_error_in_the_call_leaves_the_pipeline_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = todays.flux()
    given = torch.Generator().manual_seed(3)
    before, drawn = state(pipe), given.get_state().tolist()
    with pytest.raises(ValueError, match="Provide"):
        rehearse(pipe, num_inference_steps=2, generator=given)

    def stops(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pipe.scheduler), "step", stops)
    with pytest.raises(KeyboardInterrupt):
        rehearse(pipe, **todays.prompts(pipe), width=64, height=64, generator=given)
    assert state(pipe) == before and given.get_state().tolist() == drawn


class Combined:
    """A pipeline that holds a pipeline, whose models it lists, and reads a weight."""

    def __init__(self) -> None:
        self.inner = TwoExperts(16)
        self.components = self.inner.components

    def __call__(self, prompt: str, num_inference_steps: int = 4) -> Any:
        picture = self.inner(prompt, num_inference_steps=num_inference_steps)
        return picture * float((self.inner.late.out.bias * 2).numpy().max())


def test_a_pipeline_in_a_pipeline_is_rehearsed_too() -> None:
    pipe, ran = Combined(), []
    parts = pipe.components.values()
    for part in parts:
        part.register_forward_hook(lambda module, *_: ran.append(module in parts))
    before = state(pipe)
    record = rehearse(pipe, prompt="a")
    assert rehearsed.rehearsal(record) == rehearsed.rehearsal(rehearse(TwoExperts(16), prompt="a"))
    assert record.counts["early"] == 2 and state(pipe) == before and not any(ran)


def test_callbacks_are_not_called() -> None:
    call = {"prompt": "a", "width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
    record = rehearse(families.plain("sd15"), **call, callback_on_step_end=pytest.fail)
    assert record.counts["unet"] == 2


def test_two_threads_rehearse_one_pipeline() -> None:
    pipe = families.plain("sd15")
    call = {"prompt": "a red apple", "width": 64, "height": 64, "num_inference_steps": 2, "output_type": "pt"}
    expected, before, found = rehearsed.rehearsal(rehearse(pipe, **call)), state(pipe), []
    threads = [threading.Thread(target=lambda: found.append(rehearse(pipe, **call))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rehearsed.rehearsal(record) for record in found] == [expected] * 2 and state(pipe) == before


def test_denoisers_are_what_is_called_in_every_step() -> None:
    record = rehearse(TwoExperts(), prompt="a", num_inference_steps=6, boundary=0.3)
    assert record.steps == (("early",), ("late",)) and dict(record.counts)["late"] == 4
    make, call_of = KINDS["controlnet"]
    pipe = make()
    assert rehearse(pipe, **call_of(pipe), num_inference_steps=STEPS).steps == (("controlnet", "unet"),)


def test_the_record_has_what_the_pipeline_holds() -> None:
    record = rehearse(TwoExperts(), prompt="a", height=512, width=512, num_inference_steps=4)
    rows = {row.component: row for row in record.rows}
    latents, words = 4 * 4 * 64 * 64, 4 * 16 * 32
    held = rows["early"].held_bytes
    assert 2 * latents + words <= held + rows["early"].given_bytes - 2 * latents <= 6 * latents + 4 * words + 4096
    assert rows["vae"].size == (512, 512) and record.size == (512, 512)


@pytest.mark.parametrize("kind", KINDS)
def test_more_steps_hold_no_more_than_their_times(kind: str) -> None:
    make, call_of = KINDS[kind]
    pipe = make()
    few, many = (rehearse(pipe, **call_of(pipe), num_inference_steps=steps) for steps in (5, 10))
    held = [max(row.held_bytes for row in record.rows) for record in (few, many)]
    assert held[0] <= held[1] <= held[0] + 5 * 16  # a time and a noise level for each


def test_a_film_takes_no_memory() -> None:
    record = rehearse(TwoExperts(8), prompt="a", height=8192, width=8192, num_inference_steps=2)
    decode = record.rows[-1]
    assert decode.output_bytes == 4 * 3 * 8192**2 and decode.size == (8192, 8192)


class Selects(nn.Module):
    """A denoiser that computes with the words of a mask only, each of them attended to by flex attention."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.text = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(32, 32)

    def forward(self, noisy: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        mask = mask.bool()
        chosen = torch.cat([self.text(each[valid]) for each, valid in zip(words, mask, strict=True)])[None, None]
        attended = flex_attention(chosen, chosen, chosen)
        return self.into(noisy) * attended.mean()


class WithMasks:
    """A pipeline that takes no step if few are requested at a low strength, and then decodes nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.components = {"unet": Selects().eval(), "vae": todays.vae(channels=4)}

    def __call__(
        self, mask: Tensor, strength: float = 0.3, num_inference_steps: int = 10, only: int | None = None
    ) -> Tensor:
        if only not in (None, num_inference_steps):
            raise ValueError(f"takes {only} steps")
        unet = self.components["unet"]
        unet.into.bias = nn.Parameter(unet.into.bias, requires_grad=False)
        steps = int(strength * num_inference_steps)
        latents = torch.zeros(min(1, steps), 4, 8, 8)
        for _ in range(steps):
            latents = latents + self.components["unet"](latents, torch.zeros(2, 5, 32), mask)
        picture: Tensor = self.components["vae"].decode(latents.view(1, 4, 8, 8), return_dict=False)[0]
        return picture


def test_masks_flex_attention_and_a_low_strength_are_rehearsed() -> None:
    pipe, mask = WithMasks(), torch.tensor([[1, 1, 0, 0, 1], [0, 1, 0, 1, 0]])
    for only in (None, 10):
        record = rehearse(pipe, mask=mask, only=only)
        assert rehearsed.rehearsal(record) == rehearsed.real(pipe, mask=mask)
        assert record.steps == (("unet",),) and record.counts == {"unet": 3, "vae": 1}


def test_flex_attention_is_traced_by_its_operators() -> None:
    given = torch.zeros(1, 2, 512, 32)

    def attend(tokens: Tensor) -> Tensor:
        made: Tensor = flex_attention(tokens, tokens, tokens)
        return made

    measured = measured_peak(lambda: attend(given)) + given.nbytes
    assert 0.9 * measured <= sd_lowvram.trace(attend, given).peak_bytes <= 1.1 * measured


def test_a_large_result_is_held_as_long_as_the_pipeline_holds_it() -> None:
    def call(self: TwoExperts, prompt: str, num_inference_steps: int = 4) -> Any:
        words = self.reader(torch.zeros(1, 1 << 19, dtype=torch.int64))[:, :16] * 1
        return self.early(torch.zeros(2, 4, 8, 8), torch.tensor(1.0), words)

    record = rehearse(type("Long", (TwoExperts,), {"__call__": call})(16), prompt="a")
    reads, denoises = record.rows
    assert reads.output_bytes == 4 * 32 << 19 <= reads.after_bytes and denoises.held_bytes < 1 << 20


def test_lists_of_known_values_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before, operators, dispatch = FakeTensor.tolist, list[Any](), values._Values.__torch_dispatch__

    def count(mode: Any, func: Any, *args: Any) -> Any:
        operators.append(func)
        return dispatch(mode, func, *args)

    def read(known: Tensor, unknown: Tensor) -> list[Any]:
        lists = [known.tolist(), known.view(50, 2)[1].tolist(), (known + 1).tolist()]
        assert len(operators) < 20
        known.add_(unknown)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            known.tolist()
        return lists

    monkeypatch.setattr(values._Values, "__torch_dispatch__", count)
    numbers = torch.arange(100)
    row = row_of("", "", "", None, (numbers, torch.empty(100, dtype=torch.long, device="meta")), {})
    with FakeTensorMode():
        fakes = torch.empty(100, dtype=torch.long), torch.empty(100, dtype=torch.long)
        lists = values.call_with_values(row, read, *fakes)
    assert lists == [numbers.tolist(), [2, 3], (numbers + 1).tolist()]
    assert FakeTensor.tolist is before
