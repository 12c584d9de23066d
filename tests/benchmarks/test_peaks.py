"""Plans and the allocator agree on a GPU; `python -m benchmarks gpu` measures more of them."""

from __future__ import annotations

import pytest

from benchmarks.gpu.peaks import trial_peaks
from benchmarks.trial import measure_each
from sd_lowvram.units import MIB

pytestmark = pytest.mark.gpu


def test_the_peak_is_the_one_predicted() -> None:
    cases = [{"model": "sd15", "side": 512, "share": share} for share in (0.0, 0.5, 1.0)]
    for case, row in zip(cases, measure_each(trial_peaks, cases, seconds=lambda: 600.0, device="cuda"), strict=True):
        assert "error" not in row, row["error"]
        measured = row["measured_bytes"] - row["library_bytes"]
        apart = (row["predicted_bytes"] - measured) / MIB
        assert row["within"], f"{case}: {apart:+.1f} MiB beside {measured / MIB:.0f} MiB: {row}"
