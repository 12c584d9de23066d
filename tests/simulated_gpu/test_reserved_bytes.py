"""What plans say of torch's allocator is what it does; and a plan runs on a card that gives just what was planned."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from on_card import GPU, LARGE, rest_taken
from plans_on_card import Case, drawn, drawn_budgets, on_card, within_budget
from run_log import logged

from sd_lowvram.devices import calibration
from sd_lowvram.devices.calibration import measured_overhead
from sd_lowvram.devices.this_machine import overhead_of
from sd_lowvram.errors import BudgetError
from sd_lowvram.memory.reserved import allocator_settings
from sd_lowvram.memory.segments import begin_stage
from sd_lowvram.patches import set_patch
from sd_lowvram.streaming.engine import ActiveStreams, Stream
from sd_lowvram.streaming.host_weights import HostWeights
from sd_lowvram.streaming.layout import ResidencyPolicy
from sd_lowvram.weights import weight_bytes

MIB = 1 << 20
CUBLAS_BYTES = 8 * MIB + 128 * 1024
KEPT_BYTES = CUBLAS_BYTES + MIB  # with what products with a bias take


@pytest.fixture
def asked(gpu: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What torch's allocator is asked for, now and by its variable."""
    torch.cuda.empty_cache()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", request.param)
    torch._C._accelerator_setAllocatorSettings(request.param)
    yield request.param
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:1000000,expandable_segments:False")


def a_size(choice: random.Random) -> int:
    low, high = choice.choice([(1, MIB), (1, MIB), (MIB, 10 * MIB), (10 * MIB, 64 * MIB), (64 * MIB, 300 * MIB)])
    return choice.randint(low, high)


@pytest.mark.parametrize("asked", ["", "max_split_size_mb:64", "expandable_segments:True"], indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_segments_are_taken_as_by_torch(gpu: Any, seed: int, asked: str) -> None:
    choice, live = random.Random(seed), {}
    with gpu.card.of_size(16 << 30):
        room = rest_taken()
        before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        model = allocator_settings().allocator()
        for number in range(1000):
            if live and (choice.random() < 0.5 or model.allocated_bytes > 1500 * MIB):
                tensor, block = live.pop(choice.choice(list(live)))
                del tensor
                model.free(block)
            else:
                size = a_size(choice)
                live[number] = torch.empty(size, dtype=torch.uint8, device=GPU), model.allocate(size)
            if number % 400 == 399:
                torch.cuda.empty_cache()
                model.release()
            held = torch.cuda.memory_reserved() - before[0], torch.cuda.memory_allocated() - before[1]
            assert held == (model.reserved_bytes, model.allocated_bytes)
        del room


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured of the card is remembered for one test, whatever other tests measure meanwhile."""
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))


# Of the least plan 12 MiB too much are predicted if it decodes on the card: for the weights of a stage that runs once
# a segment of 20 MiB is counted in addition to its maps', in whose segments they lie when the stage is traced whole.
@pytest.mark.parametrize(
    ("model", "side", "share", "too_much"),
    [("sd15", 512, 0.0, 12 * MIB), ("sd15", 512, 0.3, 2 * MIB), ("sd15", 1024, 0.3, 2 * MIB)],
)
def test_a_plan_runs_on_a_card_of_its_size(
    gpu: Any, own_cache: None, model: str, side: int, share: float, too_much: int
) -> None:
    row = on_card(gpu, Case(model, side, side, share))
    assert row.ran
    assert 0 <= row.planned_reserved - row.reserved <= max(too_much, row.reserved // 5)
    assert abs(row.planned_peak - row.peak) <= max(2 * MIB, row.peak // 50)


@pytest.mark.parametrize("split", [True, False])
def test_a_ring_that_follows_the_activations_on_a_card_of_its_size(gpu: Any, own_cache: None, split: bool) -> None:
    """Its memory is the allocator's, with the activations': where these take most, hardly any weights are there.

    The peak is that of the bytes asked for: layers that come whole lie each in a block that may be up to 1 MiB larger,
    which torch's own figure holds, and the plan's reserved bytes.
    """
    small: Any = {"vae_tiles": "exact", "vae_map": "recomputed", "vae_strip_mib": 4}
    row = on_card(gpu, Case("sd15", 512, 512, 1.0), offload="layer", split_layers=split, **small)
    assert row.ran
    assert abs(row.planned_peak - row.asked) <= row.asked // 50
    assert 0 <= row.planned_reserved - row.reserved <= max(2 * MIB, row.reserved // 5)
    assert row.peak < 222 * MIB  # of the activations, and of two of the largest layers next to them


@pytest.mark.parametrize("case", [Case("sd15", 640, 640, 0.4), *drawn(1, seed=640)])
@pytest.mark.parametrize("outputs_first", [False, True])
def test_a_plan_runs_whatever_comes_first_of_outputs_and_temporaries(
    gpu: Any, own_cache: None, case: Case, outputs_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels, "outputs_first", outputs_first)
    assert on_card(gpu, case).ran


@pytest.mark.parametrize("case", [Case("sd21", 544, 800, 0.15, 1, "lora"), Case("sd21", 832, 1312, 0.75, 4, "image")])
def test_a_step_that_finds_what_the_one_before_left_runs(gpu: Any, own_cache: None, case: Case) -> None:
    """Layers that were fetched ahead, and predictions, lie in segments that the first step had to itself."""
    assert on_card(gpu, case).ran


def _smallest_drawn() -> list[Case]:
    """Return of each model the case with the fewest pixels from text."""
    cases = sorted(drawn_budgets(), key=lambda case: (case.way == "text", -case.width * case.height * case.batch))
    return list({case.model: case for case in cases}.values())


@LARGE
@pytest.mark.parametrize("case", _smallest_drawn(), ids=lambda case: case.model)
def test_the_smallest_drawn_budget_of_each_model_is_kept(gpu: Any, own_cache: None, case: Case) -> None:
    held = within_budget(gpu, case)
    assert held.reserved <= held.planned <= held.budget and not held.fallback_steps


@LARGE
@pytest.mark.parametrize(
    ("width", "height", "batch"),
    [(1024, 512, 1), pytest.param(512, 512, 2, marks=pytest.mark.rare)],
)
def test_the_least_with_a_controlnet_is_what_it_needs(
    gpu: Any, own_cache: None, width: int, height: int, batch: int
) -> None:
    case = Case("sd15", width, height, 0.0, batch, "control")
    held = within_budget(gpu, case)
    assert held.reserved <= held.planned <= held.budget and not held.fallback_steps
    with logged("ran out of memory"), pytest.raises(BudgetError, match="nothing leaner fits"):
        within_budget(gpu, case, 1 / 1.08)


@LARGE
@pytest.mark.parametrize(
    "case",
    [
        Case("klein", 256, 320, 0.0),
        *(
            pytest.param(Case(*case), marks=pytest.mark.rare)
            for case in (
                ("sd15", 512, 768, 0.0, 2),
                ("sd15", 768, 512, 0.0, 2, "lora"),
                ("sdxl", 512, 1024, 0.0),
                ("sdxl", 1024, 512, 0.0, 2, "image"),
                ("sdxl", 1024, 768, 0.09, 1, "lora"),
            )
        ),
    ],
)
def test_the_limit_changes_no_copy(gpu: Any, own_cache: None, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the weights that are copied in a run within its budget and in one within four times as much."""
    copied: list[int] = []
    copy_to = HostWeights.copy_to

    def counted(weights: HostWeights, source: Any, target: Any) -> Any:
        if type(target) is torch.Tensor:  # and not of a trace
            copied.append(target.nbytes)
        return copy_to(weights, source, target)

    monkeypatch.setattr(HostWeights, "copy_to", counted)
    held = within_budget(gpu, case)
    limited = len(copied), sum(copied)
    copied.clear()
    free = within_budget(gpu, case, 4.0)
    reserved = f"{held.reserved / MIB:.0f} and {free.reserved / MIB:.0f} MiB reserved"
    print(f"{case}: {limited[1]} bytes in {limited[0]} copies; {reserved}")
    assert copied and limited == (len(copied), sum(copied)) and held.reserved <= held.planned


@pytest.mark.parametrize("asked", ["expandable_segments:True"], indirect=True)
@pytest.mark.parametrize(("model", "side", "share"), [("sd15", 512, 0.0), ("sd15", 512, 0.3), ("sd15", 1024, 0.0)])
def test_a_plan_runs_where_segments_grow(
    gpu: Any, own_cache: None, asked: str, model: str, side: int, share: float
) -> None:
    """A page of 20 MiB more or less hangs on where in a page the weights end."""
    row = on_card(gpu, Case(model, side, side, share))
    assert row.ran
    assert 0 <= row.planned_reserved - row.reserved <= max(40 * MIB, row.reserved // 5)


@pytest.mark.parametrize("gib", [4, 16])
def test_the_decoders_widest_maps_are_probed_where_there_is_room(
    gpu: Any, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels, "computes", False)
    probed, convolution = set(), calibration._convolution

    def watched(channels: int, side: int, *rest: Any) -> Any:
        probed.add((channels, side))
        return convolution(channels, side, *rest)

    monkeypatch.setattr(calibration, "_convolution", watched)
    with gpu.card.of_size(gib << 30):
        assert measured_overhead(GPU).convolution_share == 0
        torch.cuda.empty_cache()
    assert {(128, 512), (256, 512), (640, 24)} < probed  # the last as an H100 takes 15 MiB for it, and none at 512x512
    assert ((512, 1024) in probed) == (gib == 16)


@pytest.fixture
def libraries(gpu: Any, own_cache: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """That take what their name says for a convolution, and for matrix products what cuBLAS does."""
    monkeypatch.setattr(gpu.kernels, "workspace", request.param)
    monkeypatch.setattr(gpu.kernels, "matrix_bytes", CUBLAS_BYTES)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("libraries", ["none"], indirect=True)
def test_what_matrix_products_keep_is_measured_after_others_of_the_process_too(libraries: str) -> None:
    ones = torch.ones(8, 8, dtype=torch.float16, device=GPU)
    before = torch.cuda.memory_allocated()
    ones @ ones
    assert torch.cuda.memory_allocated() >= before + CUBLAS_BYTES  # as rates, which are measured first, leave it
    assert calibration._matrix_workspace(GPU) == KEPT_BYTES


@pytest.mark.parametrize(
    ("libraries", "model", "side", "share"),
    [
        *((name, "sd15", 512, share) for name in ("none", "nhwc", "fixed") for share in (0.0, 0.1, 0.3, 0.6, 1.0)),
        pytest.param("none", "sdxl", 1024, 0.0, marks=LARGE),
    ],
    indirect=["libraries"],
)
def test_a_plan_runs_beside_libraries_that_were_measured(
    gpu: Any, libraries: str, model: str, side: int, share: float
) -> None:
    row = on_card(gpu, Case(model, side, side, share))
    seen = overhead_of(GPU)
    assert (seen.matrix_bytes, seen.convolution_bytes) == (KEPT_BYTES, {"fixed": 128 * MIB}.get(libraries, 0))
    assert row.ran
    assert row.reserved <= row.planned_reserved + 2 * MIB
    assert row.locked <= row.planned_host * 1.02 + MIB
    if share == 0:  # no more than a share of what is free, which tests side by side take from each other
        assert row.locked >= min(row.planned_host, 1280 * MIB)


@pytest.mark.parametrize("libraries", ["none"], indirect=True)
def test_what_recording_leaves_of_its_libraries_is_counted_beside_the_decode(
    gpu: Any, libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels, "matrix_bytes", 32 * MIB)  # an H100's, on which this ran out
    row = on_card(gpu, Case("sd15", 504, 272, 1.0), cuda_graphs=True)
    assert row.ran
    assert row.reserved <= row.planned_reserved + 2 * MIB


def test_segments_are_freed_between_stages_and_not_between_steps_of_a_run(gpu: Any) -> None:
    class Run:
        pass

    def cached_after_next(steps_of: object | None, mib: int = 200) -> int:
        torch.empty(mib * MIB, dtype=torch.uint8, device=GPU)  # ends at once, and is cached
        begin_stage(GPU, steps_of)
        return torch.cuda.memory_reserved() - held

    run, other = Run(), Run()
    begin_stage(GPU, run)
    held = torch.cuda.memory_reserved()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((held + 201 * MIB) / total)  # also where there is no memory to spare
    try:
        assert cached_after_next(run) == 200 * MIB
        assert [cached_after_next(steps_of) for steps_of in (other, None, run)] == [0, 0, 0]
        assert cached_after_next(run) == 200 * MIB
        torch.cuda.set_per_process_memory_fraction((held + 251 * MIB) / total)
        assert cached_after_next(run, 250) == 0  # for which the allocator gave back the other
        assert [cached_after_next(run) for _ in range(2)] == [200 * MIB] * 2  # as a step finds enough
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize(("segment_mib", "shared"), [(240, 240), (270, 0), (0, 0)])
def test_steps_that_ran_short_share_one_segment(gpu: Any, segment_mib: int, shared: int) -> None:
    class Run:
        pass

    def cached_after_next(*mib: int) -> int:
        for size in mib:
            torch.empty(size * MIB, dtype=torch.uint8, device=GPU)  # ends at once, and is cached
        begin_stage(GPU, run, segment_mib * MIB)
        return (torch.cuda.memory_reserved() - held) // MIB

    run = Run()
    begin_stage(GPU, run)
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((held + 251 * MIB) / torch.cuda.mem_get_info()[1])
    try:
        assert [cached_after_next(200, 250) for _ in range(2)] == [0, shared]
        assert cached_after_next(150) == shared
        assert cached_after_next(250) == 0  # which that segment could not hold
        assert cached_after_next(150) == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_what_outlives_weights_does_not_hold_their_segment(gpu: Any) -> None:
    layer = torch.nn.Linear(2048, 5760, bias=False, dtype=torch.float16).requires_grad_(False)
    assert weight_bytes(layer) == 45 * MIB // 2  # of a segment of 24 MiB, 1.5 MiB are over
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    stream = Stream({"text_encoder": layer}, GPU, ResidencyPolicy("whole"), ActiveStreams())
    with contextlib.ExitStack() as undoing:
        for patch in stream.patches():
            undoing.callback(set_patch(patch))
        undoing.callback(stream.offload())
        embeddings = stream.run(layer, torch.zeros(120, 2048, dtype=torch.float16, device=GPU))
    torch.cuda.empty_cache()
    assert MIB < 2 * embeddings.numel() < 3 * MIB // 2
    assert torch.cuda.memory_reserved() - before < 24 * MIB
