"""Plans and the allocator agree on a GPU, each plan in a process of its own."""

from __future__ import annotations

import pytest

from sd_lowvram.bench.gpu.peaks import SHAPES, trial_peak, within
from sd_lowvram.bench.trial import measure
from sd_lowvram.units import MIB

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("model", "side"), SHAPES)
def test_the_peak_is_the_one_foretold(model: str, side: int, share: float) -> None:
    row = measure(trial_peak, seconds=280, device="cuda", model=model, side=side, share=share)
    assert "error" not in row, row["error"]
    measured = row["measured_bytes"] - row["library_bytes"]
    apart = (row["predicted_bytes"] - measured) / MIB
    assert within(row["predicted_bytes"], measured), f"{apart:+.1f} MiB beside {measured / MIB:.0f} MiB: {row}"
