"""While a planned call runs, torch reserves no more than the budget; before and after, its limit is the user's."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from on_card import GPU, rates_here, rest_taken
from run_log import logged
from test_hooks_on_the_card import denoise

import sd_lowvram
from sd_lowvram import Settings
from sd_lowvram.devices.overhead import Overhead
from sd_lowvram.devices.performance import profile
from sd_lowvram.memory import limit
from sd_lowvram.memory.accounts import tracing
from sd_lowvram.planning import request
from sd_lowvram.planning.fallback_steps import AS_BEFORE
from sd_lowvram.planning.wording import Kind
from sd_lowvram.session import attachments

MIB = 1 << 20
SIZE = 256
CARD = 4096 * MIB
CONTEXT = Overhead().context_bytes
BUDGET = CONTEXT + 200 * MIB
ROUNDING = 16  # bytes that a fraction of the card loses
fraction: Callable[[], float] = lambda: torch.cuda.get_per_process_memory_fraction(0)  # noqa: E731


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Arguments of plans; rates are not measured, and libraries have no workspaces."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    monkeypatch.setattr(request, "rates_of", lambda device: profile("rtx3060"))
    monkeypatch.setattr(request, "Overhead", lambda: Overhead(matrix_bytes=0, convolution_bytes=0))
    return {"vram": f"{BUDGET} b", "ram": "1GB", "width": SIZE, "height": SIZE, "device": GPU}


@pytest.fixture
def pipe(gpu: Any) -> Iterator[Any]:
    pipe = families.plain("sd15")
    gc.collect()
    torch.cuda.empty_cache()
    yield pipe
    sd_lowvram.restore(pipe)
    torch.cuda.set_per_process_memory_fraction(1.0)


class Calls:
    """Limits of torch's allocator, in bytes, in the calls of a pipeline's models; of a UNet whose passes are recorded,
    which has no hooks, in no call."""

    def __init__(self, pipe: Any, also: Callable[[], object] = lambda: None, recorded: bool = False) -> None:
        self.limits: list[int] = []
        self._also = also
        text = next(part for name, part in pipe.text_encoder.named_modules() if name.endswith("final_layer_norm"))
        for layer in (pipe.vae.post_quant_conv, text, *([] if recorded else [pipe.unet.conv_in])):
            layer.register_forward_hook(self._look)

    def _look(self, *_: Any) -> None:
        if tracing():
            return
        self.limits.append(round(fraction() * CARD))
        self._also()


def unplanned() -> int:
    """Bytes that earlier tests have left in segments that cannot be freed, less workspaces, which plans count."""
    gc.collect()
    torch.cuda.empty_cache()
    return limit._unplanned_bytes(0, [], [])


def tens(size: int) -> int:
    """``size`` in MiB, to ten: a small segment of what was left counts in part once planned tensors lie in it too."""
    return round(size / MIB / 10) * 10


def test_a_planned_call_is_limited_to_the_budget(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    calls, left = Calls(pipe), unplanned()
    sd_lowvram.optimize(pipe, **planned, settings=Settings(offload="component"))
    assert fraction() == 1.0  # what is attached and does not run limits nobody
    torch.cuda.reset_peak_memory_stats()
    tiny.run(pipe, size=SIZE)
    assert {tens(limit - left) for limit in calls.limits} == {200}
    assert len(calls.limits) >= 4  # text, two steps, decode
    assert torch.cuda.max_memory_reserved() - left <= BUDGET - CONTEXT
    assert fraction() == 1.0
    tiny.run(pipe, size=SIZE)  # weights and workspaces of the first run are planned
    assert {tens(limit - left) for limit in calls.limits} == {200}


def test_first_calls_are_limited_before_they_are_planned(
    gpu: Any, pipe: Any, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearse(*_: Any, **__: Any) -> None:
        raise IndexError("no values")

    monkeypatch.setattr("sd_lowvram.api.rehearse_filled", rehearse)
    calls, left = Calls(pipe), unplanned()
    plan = sd_lowvram.optimize(pipe, call={"prompt": "a"}, **planned)
    assert plan.at_first_call and plan.settings.offload == "layer"
    torch.cuda.reset_peak_memory_stats()
    assert torch.isfinite(torch.as_tensor(tiny.run(pipe, size=SIZE))).all()
    made = attachments(pipe)[-1].plan
    assert made.fits and [stage.name for stage in made.stages] == ["text", "denoise", "decode"]
    assert len(calls.limits) >= 4 and max(calls.limits) <= left + BUDGET - CONTEXT + 32 * MIB  # embeddings, latents
    assert torch.cuda.max_memory_reserved() - left <= BUDGET - CONTEXT + 32 * MIB and fraction() == 1.0


def test_what_no_plan_counts_is_added_and_is_gone_with_its_tensors(
    gpu: Any, pipe: Any, planned: dict[str, Any]
) -> None:
    calls, left = Calls(pipe), unplanned()
    sd_lowvram.optimize(pipe, **planned)
    other = torch.empty(300 * MIB, dtype=torch.uint8, device=GPU)
    tiny.run(pipe, size=SIZE)
    assert {tens(limit - left) for limit in calls.limits} == {500}
    calls.limits.clear()
    del other
    tiny.run(pipe, size=SIZE)
    assert {tens(limit - left) for limit in calls.limits} == {200}


def test_workspaces_that_are_taken_anew_are_planned_and_what_has_their_place_is_not(
    gpu: Any, pipe: Any, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(pipe)
    room = rest_taken()
    left = torch.cuda.memory_reserved()
    monkeypatch.setattr(gpu.kernels, "matrix_bytes", 32 * MIB)
    sd_lowvram.optimize(pipe, **planned)
    tiny.run(pipe, size=SIZE)
    gpu.kernels.forget()
    others = [torch.empty(size, dtype=torch.uint8, device=GPU) for size in (32 * MIB, MIB)]
    calls.limits.clear()
    for _ in range(2):
        tiny.run(pipe, size=SIZE)
    assert {tens(each - left) for each in calls.limits} == {230}
    del others, room


def test_graphs_of_others_are_added_and_those_of_a_plan_are_not(
    gpu: Any, pipe: Any, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace of a recording's products stays in its pool once the recording is freed, before the decode."""
    calls = Calls(pipe, recorded=True)
    room = rest_taken()
    left = torch.cuda.memory_reserved()
    monkeypatch.setattr(gpu.kernels, "matrix_bytes", 32 * MIB)
    sd_lowvram.optimize(pipe, settings=Settings(cuda_graphs=True), **planned)
    graph, replays = torch.cuda.CUDAGraph(), gpu.card.replays
    with torch.cuda.graph(graph):
        torch.zeros(30 * MIB, dtype=torch.uint8, device=GPU)
    for runs in (1, 2):
        tiny.run(pipe, size=SIZE, steps=4)
        assert gpu.card.replays == replays + 3 * runs
    assert {tens(limit - left) for limit in calls.limits} == {230}
    del graph
    calls.limits.clear()
    tiny.run(pipe, size=SIZE, steps=4)
    assert {tens(limit - left) for limit in calls.limits} == {200}
    del room


def test_maps_of_a_controlnet_begin_no_run(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline holds those of a step until it has the next ones."""
    counted: list[int] = []
    measure = limit._Card.measure_unplanned
    monkeypatch.setattr(limit._Card, "measure_unplanned", lambda *given: counted.append(1) or measure(*given))
    bound = limit.Bound(GPU, 1 << 30, 0, {"text_encoder": "text", "controlnet": "control", "unet": "denoise"}, [])
    try:
        for run in range(2):
            with bound.during("text_encoder", "forward", ()):
                pass
            maps = buffer = None
            for step in range(4):
                with bound.during("controlnet", "forward", ()):
                    if step == 1:  # weights have been followed for a step
                        buffer = torch.empty(256 * MIB, dtype=torch.uint8, device=GPU)
                        limit.note_buffer(buffer)
                    new = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
                maps = new
                del new
                with bound.during("unet", "forward", (maps,)):
                    pass
            assert len(counted) == run + 1
            del maps, buffer
    finally:
        bound.close()
        torch.cuda.empty_cache()


def test_a_step_with_a_callback_has_freed_the_maps_of_the_step_before(gpu: Any, planned: dict[str, Any]) -> None:
    """Until Python 3.13 the interpreter keeps what ``locals()`` returned, which pipelines call for callbacks."""
    pipe, given = families.controlled(1), families.IMAGE
    made: list[list[weakref.ref[torch.Tensor]]] = []
    alive: list[list[int]] = []

    def note(_module: Any, _args: Any, maps: tuple[list[torch.Tensor], torch.Tensor]) -> None:
        made.append([weakref.ref(one) for one in maps[0]])

    def count(*_: Any) -> None:
        alive.append([sum(one() is not None for one in step) for step in made])

    sd_lowvram.optimize(pipe, **planned, settings=Settings(offload="component"))
    made.clear()
    pipe.controlnet.register_forward_hook(note)
    pipe.unet.conv_in.register_forward_hook(count)
    tiny.run(pipe, size=families.SIZE, steps=3, **given, callback_on_step_end=lambda pipe, step, time, values: values)
    sd_lowvram.restore(pipe)
    maps = len(made[0])
    assert alive == [[maps], [0, maps], [0, 0, maps]]


def test_a_repeated_call_counts_no_tensors_of_its_run_as_unplanned(
    gpu: Any, pipe: Any, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    measure = limit._Card.measure_unplanned
    monkeypatch.setattr(limit._Card, "measure_unplanned", lambda *given: counted.append(1) or measure(*given))
    steps: list[int] = []

    def fail_once(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 2:
            raise torch.OutOfMemoryError("once")

    sd_lowvram.optimize(pipe, **planned, settings=Settings(cuda_graphs=False))
    with logged("ran out"), pipe.unet.conv_in.register_forward_pre_hook(fail_once):
        tiny.run(pipe, size=SIZE, steps=3)
    assert len(attachments(pipe)[0].plan.fallback_steps) == 1 and len(counted) == 1


def test_a_model_alone(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    calls, left = Calls(pipe), unplanned()
    sd_lowvram.optimize(pipe.unet, **planned)

    denoise(pipe.unet, steps=2)
    other = torch.empty(300 * MIB, dtype=torch.uint8, device=GPU)
    denoise(pipe.unet, steps=2)
    assert [tens(limit - left) for limit in calls.limits] == [200, 200, 500, 500]
    assert other.is_cuda
    sd_lowvram.restore(pipe.unet)


@pytest.mark.parametrize("users", [0.9, 0.1])
def test_a_limit_of_the_user_is_not_raised_and_is_back(
    gpu: Any, pipe: Any, planned: dict[str, Any], users: float
) -> None:
    calls, left = Calls(pipe), unplanned()
    sd_lowvram.optimize(pipe, **planned)
    torch.cuda.set_per_process_memory_fraction(users)
    tiny.run(pipe, size=SIZE)
    assert max(calls.limits) <= min(users * CARD, left + BUDGET - CONTEXT) + ROUNDING
    assert fraction() == pytest.approx(users)


def test_a_limit_that_is_set_during_a_call_stays(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    Calls(pipe, lambda: torch.cuda.set_per_process_memory_fraction(0.7))
    sd_lowvram.optimize(pipe, **planned)
    tiny.run(pipe, size=SIZE)
    assert fraction() == pytest.approx(0.7)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_limit_is_back_after_an_error(
    gpu: Any, pipe: Any, planned: dict[str, Any], error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    calls = Calls(pipe, fail)
    sd_lowvram.optimize(pipe, **planned)
    torch.cuda.set_per_process_memory_fraction(0.8)
    with pytest.raises(error):
        tiny.run(pipe, size=SIZE)
    assert len(calls.limits) == 1 and calls.limits[0] < 0.5 * CARD
    assert fraction() == pytest.approx(0.8)


@pytest.mark.parametrize("says", [True, False])
def test_a_torch_that_cannot_be_asked_for_its_limit(
    gpu: Any, pipe: Any, planned: dict[str, Any], says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, setter = Calls(pipe), torch.cuda.set_per_process_memory_fraction
    now = torch.cuda.get_per_process_memory_fraction
    monkeypatch.setattr(sys.modules[__name__], "fraction", lambda: now(0))
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    sd_lowvram.optimize(pipe, **planned)
    if says:
        torch.cuda.set_per_process_memory_fraction(0.8)
        tiny.run(pipe, size=SIZE)
    else:
        with logged(r"after planned calls it is 1.0"):
            tiny.run(pipe, size=SIZE)
    assert max(calls.limits) < 0.5 * CARD
    assert now(0) == pytest.approx(0.8 if says else 1.0)
    sd_lowvram.restore(pipe)
    assert torch.cuda.set_per_process_memory_fraction is setter


def test_a_call_that_needs_more_than_the_budget_goes_on_with_less(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    """The GPU has enough: the budget alone ends the call."""
    sd_lowvram.optimize(pipe, **planned)
    wanted = tiny.run(pipe, size=SIZE).cpu()
    sd_lowvram.restore(pipe)
    taken: list[int] = []

    def take() -> None:
        if not taken:
            taken.append(1)
            torch.empty(BUDGET, dtype=torch.uint8, device=GPU)

    Calls(pipe, take)
    left = unplanned()
    with logged("ran out of memory"):
        sd_lowvram.optimize(pipe, **planned)
        torch.cuda.reset_peak_memory_stats()
        made = tiny.run(pipe, size=SIZE).cpu()
    assert [step.name for step in attachments(pipe)[0].plan.fallback_steps] == [AS_BEFORE]
    assert torch.cuda.max_memory_reserved() - left <= BUDGET - CONTEXT
    assert fraction() == 1.0
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_two_pipelines_hold_no_more_than_both_budgets(
    gpu: Any, pipe: Any, planned: dict[str, Any], threads: int
) -> None:
    other = families.plain("sd15")
    wanted = tiny.run(pipe, size=SIZE).cpu()
    left = unplanned()
    for one in (pipe, other):
        sd_lowvram.optimize(one, **planned)
    calls = Calls(pipe), Calls(other)
    torch.cuda.reset_peak_memory_stats()
    runs = (pipe, other, pipe)[: 4 - threads]  # not two of one pipeline at once
    with ThreadPoolExecutor(threads) as pool:
        for made in pool.map(lambda one: tiny.run(one, size=SIZE).cpu(), runs):
            assert tiny.relative_error(made, wanted) < 1e-3
    assert not any(attachments(one)[0].plan.fallback_steps for one in (pipe, other))
    assert torch.cuda.max_memory_reserved() - left <= 2 * BUDGET - CONTEXT
    assert max(max(one.limits) for one in calls) - left <= 2 * BUDGET - CONTEXT + 20 * MIB
    sd_lowvram.restore(other)
    calls[0].limits.clear()
    del other
    tiny.run(pipe, size=SIZE)
    assert max(calls[0].limits) - left <= BUDGET - CONTEXT + 20 * MIB
    assert fraction() == 1.0


@pytest.mark.parametrize("stated", [True, False], ids=["stated", "empty"])
def test_what_another_process_holds_is_left_to_it(gpu: Any, pipe: Any, planned: dict[str, Any], stated: bool) -> None:
    left = unplanned()
    others = BUDGET  # of a second process with a plan of its own
    with gpu.card.of_size(others + left + BUDGET, CONTEXT + others):
        plan = sd_lowvram.optimize(pipe, **planned if stated else {**planned, "vram": None})
        assert plan.request.vram - left <= BUDGET
        torch.cuda.reset_peak_memory_stats()
        tiny.run(pipe, size=SIZE)
    assert not attachments(pipe)[0].plan.fallback_steps
    assert torch.cuda.max_memory_reserved() - left <= BUDGET - CONTEXT


def test_cuda_malloc_async_is_named(
    gpu: Any, pipe: Any, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reserved bytes are not limited, and the plan says so; its allocated bytes are."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(request, "rates_of", rates_here)
    monkeypatch.setattr(request, "overhead_of", lambda device: Overhead(matrix_bytes=0, convolution_bytes=0))
    calls = Calls(pipe)
    plan = sd_lowvram.optimize(pipe, **planned)
    assert [reason for reason in plan.reasons if reason.kind is Kind.RESERVED_UNLIMITED]
    tiny.run(pipe, size=SIZE)
    assert max(calls.limits) < 0.5 * CARD and fraction() == 1.0


def test_nothing_is_limited_in_the_process_of_comfyui(
    gpu: Any, pipe: Any, planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "comfy.model_management", sys)
    calls = Calls(pipe)
    sd_lowvram.optimize(pipe, **planned)
    tiny.run(pipe, size=SIZE)
    assert set(calls.limits) == {CARD}


def test_a_decode_within_a_budget(gpu: Any, pipe: Any, planned: dict[str, Any]) -> None:
    calls, left = Calls(pipe), unplanned()
    rest = rest_taken()
    sd_lowvram.decode(pipe.vae, torch.zeros(1, 4, 32, 32, device=GPU), vram=planned["vram"], ram="1GB")
    assert calls.limits and fraction() == 1.0
    assert max(calls.limits) - left <= BUDGET - CONTEXT + ROUNDING
    del rest
