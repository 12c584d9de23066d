"""What a card gives for allocations of known sizes. That it is what torch takes, a simulated card shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_lowvram.memory.caching_allocator import CachingAllocator, CardFullError
from sd_lowvram.memory.expandable_segments import ExpandableAllocator
from sd_lowvram.memory.reserved import reserved, segment
from sd_lowvram.units import MIB


@pytest.mark.parametrize(
    ("size", "given"),
    [(0, 0), (1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB - 1, 12), (33 * MIB, 34)],
)
def test_a_buffer_takes_a_segment(size: int, given: int) -> None:
    assert segment(size) == given * MIB


def test_free_neighbours_become_one_and_serve_again() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for part in parts[1], parts[3], parts[2]:
        allocator.free(part)
    allocator.allocate(15 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, 20 * MIB)


def test_the_smallest_free_place_that_does_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(14 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(12 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 54 * MIB


def test_unused_segments_are_given_back_before_a_card_is_full() -> None:
    allocator = CachingAllocator(card_bytes=20 * MIB)
    allocator.free(allocator.allocate(12 * MIB))
    held = allocator.allocate(14 * MIB)
    assert allocator.reserved_bytes == 14 * MIB
    with pytest.raises(CardFullError):
        allocator.allocate(8 * MIB)
    allocator.free(held)
    allocator.allocate(8 * MIB)


def test_large_segments_stay_whole_where_torch_is_told_so() -> None:
    allocator = CachingAllocator(max_split_bytes=32 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(12 * MIB)
    assert allocator.reserved_bytes == 76 * MIB


def test_what_torch_is_told_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = [(0, 64 * MIB), (0, -1), (1, 12 * MIB), (2, 60 * MIB)]
    assert reserved(allocations).least == 124 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.9, max_split_size_mb:32")
    assert reserved(allocations).least == 76 * MIB


@pytest.mark.parametrize(
    ("sizes", "taken", "left"),
    [([MIB], 2, 0), ([3 * MIB], 20, 0), ([12 * MIB], 20, 0), ([12 * MIB, 12 * MIB], 40, 40), ([30 * MIB, 5], 42, 2)],
)
def test_segments_that_grow_take_pages_and_keep_those_in_use(sizes: list[int], taken: int, left: int) -> None:
    allocator = ExpandableAllocator()
    first, *_ = [allocator.allocate(size) for size in sizes]
    assert allocator.reserved_bytes == taken * MIB
    allocator.free(first)
    allocator.release()
    assert allocator.reserved_bytes == left * MIB


def test_segments_that_grow_do_not_break_up(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = [(0, 40 * MIB), (0, -1), (1, 12 * MIB), (2, 30 * MIB), (1, -1), (2, -1)]
    plain = reserved(allocations).least
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert reserved(allocations).least == 80 * MIB  # and a page for where the weights end
    assert segment(33 * MIB) == 40 * MIB
    monkeypatch.setattr("sys.platform", "win32")  # where torch has none
    assert reserved(allocations).least == plain


def test_a_tensor_in_a_large_segment_keeps_all_of_it() -> None:
    """Of 40 MiB that are free, a tensor of 12 leaves too little for the next 30."""
    assert reserved([(0, 40 * MIB), (0, -1), (1, 12 * MIB), (2, 30 * MIB), (1, -1), (2, -1)]).least == 70 * MIB


def test_what_is_not_in_use_is_kept_where_nothing_can_be_given_back() -> None:
    assert reserved([(0, 40 * MIB), (0, -1), (1, 60 * MIB), (1, -1)]) == (60 * MIB, 100 * MIB)


def test_what_a_library_keeps_takes_a_segment_of_which_the_rest_is_used() -> None:
    assert reserved([(0, 40 * MIB), (0, -1)], held=8 * MIB).least == 60 * MIB
    assert reserved([(0, 9 * MIB), (0, -1)], held=8 * MIB).least == 20 * MIB


def test_what_a_step_leaves_for_the_next_lies_in_the_way_of_it() -> None:
    """Weights of 12 MiB, fetched ahead while the first ones are still there, lie where 40 MiB were."""
    step = [(0, 12 * MIB), (1, 40 * MIB), (1, -1), (2, 12 * MIB), (0, -1)]
    assert reserved(step).least == 52 * MIB
    assert reserved(step, again=True).least == 80 * MIB


_OPERATIONS = st.lists(
    st.tuples(st.sampled_from([300, MIB // 2, 3 * MIB, 9 * MIB, 17 * MIB, 40 * MIB]), st.integers(0, 5))
)


@given(_OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_never_less_than_what_is_held_nor_more_than_what_is_taken_where_there_is_enough(
    operations: list[tuple[int, int]],
) -> None:
    allocations: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    most = 0
    for number, (size, victim) in enumerate(operations):
        if victim in live:
            allocations.append((victim, -1))
            del live[victim]
        allocations.append((number, size))
        live[number] = size
        most = max(most, sum(live.values()))
    for allocator in (CachingAllocator(), ExpandableAllocator()):
        blocks: dict[int, Any] = {}
        for number, size in allocations:
            if size < 0:
                allocator.free(blocks.pop(number))
            else:
                blocks[number] = allocator.allocate(size)
        if isinstance(allocator, CachingAllocator):
            least, kept = reserved(allocations)
            assert most <= least <= kept
            assert allocator.peak_bytes <= kept + 2 * MIB
        assert allocator.reserved_bytes >= allocator.allocated_bytes >= sum(live.values())
        for block in blocks.values():
            allocator.free(block)
        allocator.release()
        assert allocator.reserved_bytes == allocator.allocated_bytes == 0
