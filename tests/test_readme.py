"""The README tells of every knob, and its fidelity is the one that the code states."""

from __future__ import annotations

from pathlib import Path

from sd_lowvram.commands.knobs import fidelity_words
from sd_lowvram.devices import support
from sd_lowvram.settings import Knob, knobs

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

LEVELS = (support.TESTED, support.SIMULATED, support.UNTESTED)


def test_the_table_of_knobs_is_made_of_their_declarations() -> None:
    """To write it anew, take the rows that this test expects."""
    _, _, table = README.partition("| knob | values | what it does | fidelity |\n|---|---|---|---|\n")
    assert table.partition("\n\n")[0].splitlines() == [row(name, knob) for name, knob in knobs().items()]


def row(name: str, knob: Knob) -> str:
    number = f"up to {knob.maximum} {knob.unit}".strip()
    values = ", ".join(knob.choices) or {int: number, bool: "on, off"}[knob.type]
    return f"| `{name}` | {values} | {knob.help} | {fidelity_words(knob)} |"


def test_what_may_be_expected_of_devices_is_what_doctor_tells() -> None:
    known = [one for one in vars(support).values() if isinstance(one, support.Support)]
    assert len(known) == 7
    for one in known:
        rows = [line.split("|") for line in README.splitlines() if line.startswith("| ")]
        levels = [row[2].strip() for row in rows if one.name in row[1] and row[2].strip() in LEVELS]
        assert levels == [one.level], one.name
