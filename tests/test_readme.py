"""The README tells of every knob, and its fidelity is the one that the code states."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_lowvram.settings import knobs

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", knobs())
def test_every_knob_has_its_row(name: str) -> None:
    rows = [line for line in README.splitlines() if line.startswith(f"| `{name}` ")]
    assert len(rows) == 1
    knob = knobs()[name]
    values = knob.choices or (True,) if knob.type is not int else (knob.minimum,)
    assert str(max(knob.fidelity_of(value) for value in values)) in rows[0].split("|")[3]
    assert all(choice.split("-")[0] in rows[0] for choice in knob.choices)
