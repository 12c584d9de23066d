"""What stays on the device, what passes through the ring, and how long a step then takes."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_lowvram.errors import BudgetError
from sd_lowvram.streaming.policies import POLICIES
from sd_lowvram.streaming.schedule import ALIGNMENT, WeightGroup, align, follow_maps, lay_out
from sd_lowvram.streaming.search import best_schedule, lower_bound, smallest_schedule
from sd_lowvram.streaming.simulator import CopyQueue, simulate, simulate_first, step_cost

K = ALIGNMENT


def lists_of_units(maps):
    sizes = st.integers(0, 40).map(lambda size: size * K - size % 7)
    made = st.builds(WeightGroup, name=st.just("layer"), bytes=sizes, seconds=st.floats(0.0, 4.0), maps=maps)
    return st.lists(made, min_size=1, max_size=12)


UNITS = lists_of_units(st.just(0))
BESIDE_MAPS = lists_of_units(st.integers(0, 60 * K))
COPIES = st.builds(
    CopyQueue,
    bandwidth=st.floats(K / 4, 40 * K),
    latency=st.sampled_from([0.0, 0.05]),
    overlap=st.booleans(),
    reading=st.floats(K / 4, 40 * K),
    pinned=st.none() | st.integers(0, 200 * K),
    disk=st.floats(K / 8, 20 * K),
    cached=st.none() | st.integers(0, 100 * K),
    host_seconds=st.sampled_from([0.0, 0.5]),
)


def unit(size, seconds=1.0):
    return WeightGroup("layer", size * K, seconds)


def budget(units, share):
    """Between the largest unit and all of them."""
    sizes = [align(one.bytes) for one in units]
    return max(sizes) + int(share * (sum(sizes) - max(sizes)))


def assert_nobody_is_overwritten(units, schedule):
    """A fetch may run as soon as it and those issued before it need not wait: nothing it covers is still needed then,
    and it does not wait for what comes later itself."""
    places = {fetch.unit: (fetch.offset, fetch.offset + align(units[fetch.unit].bytes)) for fetch in schedule.fetches}
    assert not places.keys() & schedule.resident
    assert places.keys() | schedule.resident == {number for number, one in enumerate(units) if one.bytes}
    passed = -1
    issued = []
    for step in range(3):
        for fetch in schedule.fetches:
            waits = fetch.after + (step - (fetch.after >= fetch.unit)) * len(units)
            passed = max(passed, waits)
            start, stop = places[fetch.unit]
            assert start >= 0 and stop <= schedule.ring_bytes
            for moment, (begins, ends) in issued:
                assert moment <= passed or ends <= start or stop <= begins
            moment = fetch.unit + step * len(units)
            assert passed < moment
            issued.append((moment, (start, stop)))


@given(UNITS, st.data(), st.floats(0, 1))
def test_a_place_in_the_ring_is_free_when_it_is_filled(units, data, share):
    resident = data.draw(st.sets(st.integers(0, len(units) - 1)))
    streamed = [one for number, one in enumerate(units) if number not in resident]
    schedule = lay_out(units, resident, budget(streamed, share) if streamed else 0)
    assert_nobody_is_overwritten(units, schedule)
    kept = sum(align(units[number].bytes) for number in resident)
    assert schedule.resident_bytes == kept and schedule.device_bytes == kept + schedule.ring_bytes


@given(BESIDE_MAPS, st.floats(0, 1), st.floats(0, 1))
def test_a_ring_that_follows_leaves_the_activations_their_bytes(units, share, other):
    """As the engine goes: at each unit the one before is dropped, and further units are fetched as long as they fit."""
    count, sizes = len(units), [align(one.bytes) for one in units]
    least = max(one.maps + size for one, size in zip(units, sizes, strict=True))
    most, ring = least + int(share * sum(sizes)), max(sizes) + int(other * sum(sizes))
    schedule = follow_maps(units, most, ring)
    assert [fetch.unit for fetch in schedule.fetches] == [number for number, size in enumerate(sizes) if size]
    after = {fetch.unit: fetch.after for fetch in schedule.fetches}
    last, before = -1, None
    for at in range(3 * count):
        fetched = [at] if last < at else []
        last = max(last, at)
        while last + 1 < at + count:
            wanted = sum(sizes[number % count] for number in range(at, last + 2))
            if wanted > schedule.rooms[at % count]:
                break
            last += 1
            fetched.append(last)
        held = sum(sizes[number % count] for number in range(at, last + 1))
        assert held <= ring and held + units[at % count].maps <= most
        assert held == schedule.rooms[at % count] or last + 1 == at + count
        for number in fetched if at >= count else ():
            assert not sizes[number % count] or after[number % count] == before
        before = at % count if sizes[at % count] else before


def test_a_ring_that_follows_is_small_where_the_activations_are_large():
    units = [dataclasses.replace(unit(size), maps=maps * K) for size, maps in ((1, 9), (5, 2), (5, 2), (1, 9))]
    schedule = follow_maps(units, 12 * K, 10 * K)
    assert [room // K for room in schedule.rooms] == [1, 10, 7, 2]
    assert schedule.ring_bytes == 10 * K
    assert [fetch.after for fetch in schedule.fetches] == [1, 0, 0, 1]
    assert follow_maps(units, 17 * K, 10 * K).rooms[0] == 6 * K  # the next one is there next to the large activations


@settings(max_examples=60)
@given(BESIDE_MAPS, st.floats(0, 1), COPIES)
def test_a_ring_that_follows_is_no_slower_than_one_that_does_not(units, share, copies):
    ring = lay_out(units, (), budget(units, share))
    found = smallest_schedule(units, ring, copies)
    assert found.ring_bytes <= ring.ring_bytes
    assert simulate(units, found, copies) <= simulate(units, ring, copies) * (1 + 1e-6)
    if not any(one.maps for one in units):
        assert found == ring
    assert smallest_schedule([dataclasses.replace(one, maps=0) for one in units], ring, copies) == ring


def test_fetches_wait_for_the_last_who_used_their_bytes():
    schedule = lay_out([unit(2), unit(1), unit(2), unit(3)], {1}, 5 * K)
    places = [(fetch.unit, fetch.offset // K, fetch.after) for fetch in schedule.fetches]
    # 3 does not fit behind 2 and begins anew, over 0 and half of 2; the next step's 0 and 2 then come after it
    assert places == [(0, 0, 3), (2, 2, 3), (3, 0, 2)]


@pytest.mark.parametrize(
    ("ring", "expected"),
    [
        (1, 4.0),  # each copy waits for the other unit's end
        (2, 2.0),  # each overlaps with the other unit
    ],
)
def test_two_units_that_take_turns(ring, expected):
    units = [unit(1), unit(1)]
    assert simulate(units, lay_out(units, (), ring * K), CopyQueue(K)) == pytest.approx(expected)


def test_a_resident_costs_nothing_and_a_fetch_its_latency():
    units = [unit(1), unit(1)]
    copies = CopyQueue(K, latency=0.5)
    assert simulate(units, lay_out(units, {0, 1}, 0), copies) == pytest.approx(2.0)
    # one copy of 1.5 s, which begins at the end of its unit and overlaps with one second of compute
    assert simulate(units, lay_out(units, {0}, K), copies) == pytest.approx(2.5)
    assert simulate(units, lay_out(units, {0}, K), CopyQueue(K, 0.5, overlap=False)) == pytest.approx(3.5)


def test_what_has_to_be_read_takes_as_long_as_reading_it():
    """The reader fills the ring while its chunks are copied; a CPU does one after the other."""
    units = [unit(2), unit(4)]
    mapped = CopyQueue(4 * K, reading=K, pinned=2 * K)
    assert list(mapped.fetch_seconds([one.bytes for one in units])) == pytest.approx([0.5, 4.0])
    assert list(CopyQueue(K, reading=4 * K, pinned=3 * K).fetch_seconds([2 * K, 4 * K])) == pytest.approx([2.0, 4.0])
    one_by_one = dataclasses.replace(mapped, overlap=False)
    assert list(one_by_one.fetch_seconds([one.bytes for one in units])) == pytest.approx([0.5, 5.0])
    assert simulate(units, lay_out(units, (), 6 * K), one_by_one) == pytest.approx(7.5)
    assert simulate(units, lay_out(units, (), 6 * K), mapped) == pytest.approx(5.0)


def test_another_schedule_is_best_where_reading_takes_longest():
    units = [unit(5, 3.0), unit(15, 3.0), unit(21, 6.0), unit(8, 5.0)]
    pinned = CopyQueue(5 * K)
    mapped = dataclasses.replace(pinned, reading=2 * K, pinned=0)
    room = 45 * K
    of_pinned, of_mapped = (best_schedule(units, room, copies) for copies in (pinned, mapped))
    assert of_pinned.resident != of_mapped.resident
    assert [simulate(units, of_pinned, copies) for copies in (pinned, mapped)] == pytest.approx([17.0, 21.5])
    assert [simulate(units, of_mapped, copies) for copies in (pinned, mapped)] == pytest.approx([18.0, 19.5])


def test_prefetch_runs_over_into_the_next_step():
    units = [unit(4, seconds=1.0), *[unit(0, seconds=1.0)] * 3]
    assert simulate(units, lay_out(units, (), 4 * K), CopyQueue(2 * K)) == pytest.approx(4.0)


@settings(max_examples=80)
@given(UNITS, st.floats(0, 1), COPIES)
def test_the_search_never_costs_more_than_the_simple_policies(units, share, copies):
    room = budget(units, share)
    best = best_schedule(units, room, copies)
    assert best.device_bytes <= room
    assert_nobody_is_overwritten(units, best)
    seconds = simulate(units, best, copies)
    assert seconds >= lower_bound(units, room, copies) * (1 - 1e-6)
    for policy in POLICIES.values():
        other = policy(units, room)
        assert other.device_bytes <= room
        assert step_cost(units, best, copies) <= step_cost(units, other, copies) * (1 + 1e-9)


def best_of_all_residents(units, room, copies):
    """The cost of a step with the best set of residents."""

    def cost(resident):
        ring = room - sum(align(units[number].bytes) for number in resident)
        try:
            return step_cost(units, lay_out(units, resident, ring), copies) if ring >= 0 else float("inf")
        except BudgetError:
            return float("inf")

    numbers = range(len(units))
    every = itertools.chain.from_iterable(itertools.combinations(numbers, count) for count in range(len(units) + 1))
    return min(map(cost, every))


@settings(max_examples=40)
@given(UNITS.filter(lambda units: len(units) < 8), st.floats(0, 1), COPIES)
def test_of_few_units_the_search_finds_the_best_residents(units, share, copies):
    room = budget(units, share)
    found = step_cost(units, best_schedule(units, room, copies), copies)
    assert found <= best_of_all_residents(units, room, copies) * (1 + 1e-9)


def test_of_more_units_the_search_comes_near_the_best_residents():
    """The grid alone acts there; the units are the same every time."""
    chance, times = random.Random(0), []
    for _ in range(12):
        units = [unit(chance.randint(1, 40), chance.random()) for _ in range(11)]
        room, copies = budget(units, chance.random()), CopyQueue(chance.uniform(5, 40) * K)
        found = step_cost(units, best_schedule(units, room, copies), copies)
        times.append(found / best_of_all_residents(units, room, copies))
    assert max(times) < 1.13 and sum(times) / len(times) < 1.04


@given(UNITS, st.floats(0, 1), COPIES)
def test_a_step_is_as_long_as_its_compute_or_its_copies_at_least(units, share, copies):
    compute = sum(one.seconds for one in units)
    fetched = [one.bytes for one in units if one.bytes]
    compute += len(fetched) * copies.host_seconds
    copied = sum(copies.fetch_seconds(fetched))
    seconds = simulate(units, lay_out(units, (), budget(units, share)), copies)
    assert max(compute, copied) - 1e-6 <= seconds <= compute + copied + 1e-6


@given(UNITS, st.floats(0, 1), COPIES)
def test_a_first_step_is_as_long_as_all_copies_at_least(units, share, copies):
    compute = sum(one.seconds + copies.host_seconds * (one.bytes > 0) for one in units)
    in_time = dataclasses.replace(copies, pinned=None, latency=0.0)
    copied = sum(one.bytes for one in units) / copies.bandwidth
    first = simulate_first(units, best_schedule(units, budget(units, share), in_time), in_time)
    assert max(compute, copied) - 1e-6 <= first <= compute + copied + 1e-6


def test_a_first_step_computes_while_it_fetches_residents():
    units = [unit(2)] * 4
    everything = lay_out(units, {0, 1, 2, 3}, 0)
    assert simulate_first(units, everything, CopyQueue(4 * K)) == pytest.approx(4.5)
    assert simulate_first(units, everything, CopyQueue(4 * K, overlap=False)) == pytest.approx(6.0)
    assert simulate_first(units, lay_out(units, {0, 1}, 2 * K), CopyQueue(4 * K)) == pytest.approx(5.0)


def test_a_larger_buffer_copies_less_though_copies_are_hidden():
    units = [unit(10)] * 20
    found = [best_schedule(units, size * K, CopyQueue(100 * K), near=True) for size in (20, 80, 180)]
    copied = [20 - len(schedule.resident) for schedule in found]
    assert copied == sorted(copied, reverse=True) and copied[-1] <= 4


def test_a_unit_that_does_not_fit_is_refused():
    units = [unit(1), WeightGroup("mid_block.conv", 5 * K, 1.0)]
    with pytest.raises(BudgetError, match=r"mid_block\.conv.*2\.5 KiB") as refusal:
        best_schedule(units, 4 * K, CopyQueue(K))
    assert refusal.value.needed_bytes == 5 * K


def test_what_would_be_read_from_disk_stays_on_the_device_though_reading_is_hidden():
    """Twenty units take longer than their copies and reads; host memory has sixteen of them, the device seven."""
    units = [unit(10) for _ in range(20)]
    copies = CopyQueue(100 * K, reading=50 * K, pinned=100 * K, cached=60 * K, disk=20 * K)
    schedule = best_schedule(units, 70 * K, copies, near=True)
    assert len(schedule.resident) >= 4
    assert simulate(units, schedule, copies) <= 1.01 * simulate(units, lay_out(units, (), 70 * K), copies)


def test_the_search_gives_the_same_again():
    units = [unit(1 + number * 7 % 11, seconds=number % 3) for number in range(40)]
    assert best_schedule(units, 60 * K, CopyQueue(3 * K)) == best_schedule(units, 60 * K, CopyQueue(3 * K))
