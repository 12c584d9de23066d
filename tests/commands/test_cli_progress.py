"""The bars that people see: steps are counted, strips are a percentage."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sd_lowvram import progress
from sd_lowvram.commands.show import Bars


@pytest.mark.parametrize(
    ("done", "total", "says"), [(3, 30, "3/30"), (1000, 1000, "100%"), (412, 1000, "41%"), (0, 251, "0%")]
)
def test_how_far_a_stage_is(done: int, total: int, says: str) -> None:
    shown = io.StringIO()
    with Bars(Console(file=shown, force_terminal=True, width=100, no_color=True), shown=True).running():
        progress.report("decode", done, total)
    assert f" {says} " in shown.getvalue()
    assert "1000" not in shown.getvalue()
