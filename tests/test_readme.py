"""The README tells of every knob, and its fidelity is the one that the code states."""

from __future__ import annotations

from pathlib import Path

import pytest

from sd_lowvram.devices import support
from sd_lowvram.settings import knobs

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

LEVELS = (support.TESTED, support.SIMULATED, support.UNTESTED)


@pytest.mark.parametrize("name", knobs())
def test_every_knob_has_its_row(name: str) -> None:
    rows = [line for line in README.splitlines() if line.startswith(f"| `{name}` ")]
    assert len(rows) == 1
    knob = knobs()[name]
    values = knob.choices or (True,) if knob.type is not int else (knob.minimum,)
    assert str(max(knob.fidelity_of(value) for value in values)) in rows[0].split("|")[3]
    assert all(choice.split("-")[0] in rows[0] for choice in knob.choices)


def test_what_may_be_expected_of_devices_is_what_doctor_tells() -> None:
    known = [one for one in vars(support).values() if isinstance(one, support.Support)]
    assert len(known) == 7
    for one in known:
        rows = [line.split("|") for line in README.splitlines() if line.startswith("| ")]
        levels = [row[2].strip() for row in rows if one.name in row[1] and row[2].strip() in LEVELS]
        assert levels == [one.level], one.name
