"""Peaks of today's models at full width are those that plans foretell; ``todays_blocks.md`` has more of them."""

from __future__ import annotations

import pytest

from benchmarks.todays_blocks import _measured


@pytest.mark.slow(8)
@pytest.mark.parametrize("way", ["exact", "plain"])
def test_a_full_size_autoencoder_holds_what_is_planned(way: str) -> None:
    row = _measured("qwen-image", "vae", 128, "float32", way)
    assert row["measured_bytes"] == pytest.approx(row["planned_bytes"], rel=0.01)
