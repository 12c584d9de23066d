"""Calibration gives figures that a plan can use, remembers them, and knows what weights in another order cost."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from sd_lowvram.commands import examination
from sd_lowvram.devices import calibration, this_machine
from sd_lowvram.devices.overhead import Overhead
from sd_lowvram.devices.performance import PROFILES, Rates, profile
from sd_lowvram.devices.this_machine import overhead_of, rates_of
from sd_lowvram.errors import BadInputError
from sd_lowvram.planning.stage_seconds import Work, clocks
from sd_lowvram.tracing import trace
from sd_lowvram.tracing.tracer import Figures

CPU = torch.device("cpu")
NOTHING = Figures(**dict.fromkeys((field.name for field in dataclasses.fields(Figures)), 0) | {"spans": ()})


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.setenv("SD_LOWVRAM_CACHE", str(tmp_path))
    return tmp_path


def test_calibration_measures_something_of_everything() -> None:
    measured = calibration.calibrate(CPU)
    assert 1e8 < measured.half_flops < 1e14 and 1e9 < measured.float_flops < 1e14
    assert 1e8 < measured.bandwidth < 1e13 and 1e8 < measured.copy_bandwidth < 1e13
    assert 1e7 < measured.packing <= 1e12 and 1e8 < measured.reading < 1e13
    assert 0 <= measured.launch_seconds < 0.01


def test_first_runs_are_measured_where_they_take_longer() -> None:
    computes, noted = [0.2], list[float]()

    def run() -> None:
        end = time.process_time() + (computes.pop() if computes else 0.0)
        while time.process_time() < end:
            pass

    with calibration._loading_noted(noted):
        calibration.fastest_seconds(run, CPU)
    assert 0.1 < sum(noted) < 2
    calibration.fastest_seconds(lambda: None, CPU)
    assert len(noted) == 1


def test_group_norms_time_beyond_its_bytes_is_that_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 128 * 512 * 512
    seconds = 4 * elements / 1e12 + 1e-3
    monkeypatch.setattr(calibration, "fastest_seconds", lambda run, device: (run().sum(), seconds)[1])
    assert calibration._group_seconds(CPU, 1e12) == pytest.approx(1e-3 / (elements / 32))
    assert calibration._group_seconds(CPU, 1e9) == 0.0


def test_rates_tell_what_other_programs_took_meanwhile() -> None:
    """One that computes during the measurement; on a machine without any it is no more than measured here."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        shared = calibration._share_of_others()
        time.sleep(1)
        taken = shared()
    finally:
        other.kill()
        other.wait()
    assert 0.3 / (os.cpu_count() or 1) < taken <= 1
    assert "40%" in calibration._source(0.4) and calibration._source(0.05) == "measured here"


def test_rates_are_measured_once(cache: Any, monkeypatch: Any) -> None:
    made = []

    def calibrate(device: torch.device) -> Rates:
        made.append(device)
        return dataclasses.replace(PROFILES["t4"], name="this", packing=float(len(made)))

    monkeypatch.setattr(this_machine, "calibrate", calibrate)
    first = rates_of(CPU)
    assert rates_of(CPU) == first and len(made) == 1
    assert rates_of(CPU, recalibrate=True).packing == 2 and rates_of(CPU).packing == 2
    (file,) = cache.glob("rates-*.json")
    for number, damage in enumerate(("no json", "[" * 100_000, file.read_text().replace("1", "2")), 3):
        file.write_text(damage)
        assert rates_of(CPU).packing == number


def test_overhead_of_a_gpu_is_the_default_until_it_was_measured(cache: Any, monkeypatch: Any) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(this_machine, "_machine", lambda device: "a-gpu")
    assert overhead_of(gpu) == Overhead()
    measured = Overhead(context_bytes=300 << 20, matrix_bytes=9 << 20, convolution_bytes=70 << 20)
    monkeypatch.setattr(this_machine, "measured_overhead", lambda device: measured)
    assert overhead_of(gpu, recalibrate=True) == measured
    assert overhead_of(gpu) == measured


def test_reordered_weights_take_time_where_weights_are_reordered() -> None:
    cpu = dataclasses.replace(PROFILES["t4"], packing=1e9, queued=False)
    work = dataclasses.replace(NOTHING, packed_bytes=2_000_000_000)
    assert cpu.seconds(work, 4) == pytest.approx(2.0)
    assert PROFILES["t4"].seconds(work, 4) == 0


def test_a_card_is_asked_for_its_name_once(cache: Any, monkeypatch: Any) -> None:
    """A process that was forked gets no answer."""
    card, names = torch.device("cuda", 7), iter(["A card"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: next(names))
    first = this_machine.place_of_measurement("overhead", card)
    assert first is not None and "A-card" in first.name
    assert this_machine.place_of_measurement("overhead", card) == first
    this_machine._name_of.cache_clear()


def test_operators_are_counted_as_a_trace_counts_them() -> None:
    layers, inputs = calibration._plain_layers(CPU)
    with torch.no_grad(), calibration.Operators() as counted:
        layers(*inputs)
    assert counted.number == trace(layers, *inputs).operators == 40


STEP = dataclasses.replace(NOTHING, flops=1_606_546_882_560, operators=734)
"""A guided step of SD1.5 at 512x512 in fp16, as traced, its bytes aside."""
LAST = dataclasses.replace(STEP, moved_bytes=8_796_072_872, product_bytes=3_783_701_128)
FULL = dataclasses.replace(STEP, moved_bytes=25_731_873_704, product_bytes=12_571_101_832, operators=894)


def test_a_card_that_its_maker_calls_faster_in_everything_is_foretold_faster() -> None:
    for one, other in itertools.permutations(PROFILES.values(), 2):
        if one.half_flops > other.half_flops and one.bandwidth > other.bandwidth:
            assert one.launch_seconds <= other.launch_seconds
            assert one.seconds(FULL, 2) < other.seconds(FULL, 2), (one.name, other.name)
    assert PROFILES["rtx2070"].half_flops > PROFILES["rtx2060"].half_flops


@pytest.mark.parametrize("written", ["8GB,20.3TFLOPS,448GB/s", "0.448 TB/s, 8 GiB, 20.3 tflop/s"])
def test_makers_figures_stand_for_a_card(written: str) -> None:
    """fp16 computes at the rate of fp32 where no other is stated."""
    known, stated, both = PROFILES["rtx3070"], profile(written), profile(f"{written},81.3TFLOPS")
    for one in (stated, both):
        assert (one.vram_bytes, one.bandwidth, one.float_flops) == pytest.approx(
            (known.vram_bytes, known.bandwidth, known.float_flops)
        )
        assert one.copy_bandwidth == known.copy_bandwidth / 2
    assert stated.half_flops == stated.float_flops and both.half_flops == known.half_flops
    assert "8 GiB, 20.3 TFLOPS, 448 GB/s" in stated.title and re.search("fp16.*fp32", stated.source)


@pytest.mark.parametrize(
    "written",
    ["8GB,20TFLOPS", "8GB,448GB/s", "20TFLOPS,448GB/s", "8GB,0TFLOPS,448GB/s", "8GB,20TFLOPS,0GB/s", "8GB,8GB,1TFLOPS",
     "8GB,1TFLOPS,2TFLOPS,3TFLOPS,448GB/s", "8GB,20TFLOPS,448GB/s,", ",,,", "8GB,1e400TFLOPS,448GB/s"],
)  # fmt: skip
def test_figures_that_are_no_cards(written: str) -> None:
    with pytest.raises(BadInputError, match="--gpu"):
        profile(written)


@pytest.mark.parametrize(
    ("written", "near"),
    [("rtx3075", "rtx3070"), ("RTX 4070 Tie", "rtx4070-ti"), ("rx7900", "rx7900-xt"), ("GeForce GTX 1090", "gtx1080")],
)
def test_a_card_that_is_unknown_is_refused_with_those_nearest_to_it(written: str, near: str) -> None:
    with pytest.raises(BadInputError) as told:
        profile(written)
    named = str(told.value).split("choose one of ")[1].split(", ")
    assert near in named and len(named) <= 5


def test_cards_that_people_have_are_known() -> None:
    cards = "GTX 1060, GTX 1070, GTX 1080, RTX 3070, RTX 3080, RTX 3090, RTX 4060 Ti, RTX 4070, RTX 4080, RTX 5060"
    cards += ", RTX 5070, RTX 5080, RTX 5090, RX 6600, RX 6700 XT, RX 6800, RX 6900 XT, RX 7600, RX 7700 XT"
    cards += ", RX 7800 XT, RX 7900 XTX"
    for card in cards.split(", "):
        assert card in profile(card).title


@pytest.mark.parametrize("card", PROFILES)
def test_scores_that_are_written_take_a_card_time(card: str) -> None:
    assert PROFILES[card].seconds(FULL, 2) > 1.1 * PROFILES[card].seconds(LAST, 2)


def test_a_product_takes_the_longer_of_operations_and_bytes_and_all_else_its_bytes() -> None:
    card = dataclasses.replace(PROFILES["t4"], half_flops=1e12, bandwidth=1e11)
    product = dataclasses.replace(NOTHING, flops=10**12, product_bytes=10**9, moved_bytes=10**9)
    assert card.seconds(product, 2) == pytest.approx(1.0)
    thin = dataclasses.replace(product, product_bytes=2 * 10**11, moved_bytes=2 * 10**11)
    assert card.seconds(thin, 2) == pytest.approx(2.0)
    followed = dataclasses.replace(product, moved_bytes=10**9 + 10**11)
    assert card.seconds(followed, 2) == pytest.approx(2.0)


def test_wide_products_have_a_rate_of_their_own_in_16_bits_where_it_was_measured() -> None:
    card = dataclasses.replace(PROFILES["t4"], half_flops=1e12, float_flops=5e11, wide_flops=4e12)
    step = dataclasses.replace(NOTHING, flops=5 * 10**12, wide_flops=4 * 10**12)
    assert card.seconds(step, 2) == pytest.approx(2.0) and card.seconds(step, 4) == pytest.approx(10.0)
    assert dataclasses.replace(card, wide_flops=0.0).seconds(step, 2) == pytest.approx(5.0)
    assert {name for name, one in PROFILES.items() if one.wide_flops} == {"h100", "h200"}


def test_a_group_of_a_norm_takes_its_time_however_fast_the_memory_is() -> None:
    norm = dataclasses.replace(NOTHING, moved_bytes=10**9, group_elements=10**6)
    card = dataclasses.replace(PROFILES["t4"], bandwidth=1e12, group_seconds=1e-9)
    assert card.seconds(norm, 2) == pytest.approx(2e-3)
    assert dataclasses.replace(card, group_seconds=0.0).seconds(norm, 2) == pytest.approx(1e-3)


def test_an_operator_of_strips_takes_less_host_time_where_it_was_measured() -> None:
    decode = dataclasses.replace(NOTHING, operators=10_000, copied_bytes=10**6)
    card = PROFILES["h100"]
    whole, strips = (clocks(Work(decode, 2, in_strips), card).seconds(card) for in_strips in (False, True))
    assert whole == pytest.approx(10_000 * card.launch_seconds, rel=1e-3)
    assert strips == pytest.approx(card.strip_launches * whole, rel=1e-3) and strips < whole


def test_a_replay_takes_the_time_of_looking_through_its_modules_where_that_is_longer() -> None:
    figures = dataclasses.replace(NOTHING, operators=1000)
    card = dataclasses.replace(PROFILES["t4"], replay_launches=0.5)
    seconds = clocks(Work(figures, 2, replayed_modules=300), card).seconds(card)
    assert seconds == pytest.approx(150 * card.launch_seconds)


def test_calibration_measures_the_host_time_of_our_engine(cache: Any) -> None:
    before = rates_of(CPU)
    measured = examination.MEASURED["host"](CPU)
    assert measured is not None and measured.keys() == {"layer_launches", "fetch_launches"}
    assert all(0 <= launches < 100 for launches in measured.values())
    assert rates_of(CPU) == dataclasses.replace(before, **measured)
    this_machine.remember_host_time(CPU, {"layer_launches": 2.0})  # as an earlier version did, with fetches in it
    assert rates_of(CPU) == before


def test_copies_of_maps_hide_behind_launches() -> None:
    card = PROFILES["rtx2070"]
    launching = 10_000 * card.launch_seconds
    parked = dataclasses.replace(NOTHING, operators=10_000, copied_bytes=int(0.1 * launching * card.copy_bandwidth))
    assert card.seconds(parked, 2) == pytest.approx(launching, rel=1e-3)


def test_launches_hide_behind_the_arithmetic_of_large_pictures() -> None:
    card = PROFILES["rtx2070"]
    small = dataclasses.replace(NOTHING, flops=10**9, operators=734)
    large = dataclasses.replace(NOTHING, flops=10**14, operators=734)
    assert card.seconds(small, 2) == pytest.approx(734 * card.launch_seconds, rel=0.01)
    assert card.seconds(large, 2) == pytest.approx(1e14 / card.half_flops, rel=0.01)
    at_once = dataclasses.replace(card, queued=False)  # as a CPU works
    assert at_once.seconds(small, 2) == pytest.approx(734 * card.launch_seconds + 1e9 / card.half_flops)


@pytest.mark.parametrize("queued", [True, False])
def test_parts_of_a_run_take_together_what_the_whole_takes(queued: bool) -> None:
    rates = dataclasses.replace(PROFILES["rtx2070"], queued=queued)
    parts = [dataclasses.replace(NOTHING, flops=n * 10**11, operators=40 - 9 * n, copied_bytes=n) for n in range(4)]
    names = ("flops", "operators", "copied_bytes")
    whole = dataclasses.replace(NOTHING, **{name: sum(getattr(part, name) for part in parts) for name in names})
    shares = rates.shares(parts, 2)
    assert sum(shares) == pytest.approx(rates.seconds(whole, 2)) and all(share > 0 for share in shares)
    assert rates.shares([NOTHING], 2) == [0.0]
