"""``phones``: GELU's maps are counted, and plans' figures stand beside the published ones."""

from __future__ import annotations

from benchmarks import phones


def test_gelu_is_counted_as_it_was_published() -> None:
    maps = phones.gelu_maps()
    assert tuple(maps["written out"]) == phones.PUBLISHED_GELU == (8, 10)
    assert maps["torch's operator"] == [1, 1]
