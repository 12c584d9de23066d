"""Each of the 80 rows of docs/sources.md has a command that is there, a table made once, or says why it has none."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|\n ").split(" | ")]
    for line in PAGE.replace("|  |", "| |").replace("| |", "|  - |").splitlines()
    if re.match(r"\| [A-E]\d", line)
]
COMMANDS = sorted({command for row in ROWS for command in re.findall("`([^`]+)`", row[2])})
ROOMS = {"python -m benchmarks ": "benchmarks", "sd-lowvram unet ": "sd_lowvram/unets"}
"""What the package runs without: by the beginning of commands, the folder of those that have them."""


def test_there_are_80_rows_and_each_has_a_command_a_table_or_a_reason() -> None:
    numbers = {"A": 22, "B": 19, "C": 12, "D": 16, "E": 11}
    assert [row[0] for row in ROWS] == [f"{of}{n}" for of, most in numbers.items() for n in range(1, most + 1)]
    for row in ROWS:
        assert len(row) == 4, row
        verdict = re.match(r"done|(in part|left out): \S.{20}", row[3])
        assert verdict is not None, row
        once = "made once ([table](../benchmarks/" in row[3]
        assert row[2] != "-" or once or verdict[0].startswith("left out"), row
        assert re.sub("`[^`]+`,? ?", "", row[2]) in ("", "-"), row


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_there(command: str) -> None:
    for begins, room in ROOMS.items():
        if command.startswith(begins) and not (ROOT / room).is_dir():
            pytest.skip(f"{room} is not here")
    words = shlex.split(command)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    elif words[0] == "sd-lowvram":
        from sd_lowvram.cli import app

        understood(typer.main.get_command(app), words[1:])
    elif words[1:3] == ["-m", "benchmarks"]:
        from benchmarks.cli import app as measurements

        understood(typer.main.get_command(measurements), words[3:])
    elif words[1:3] == ["-m", "pytest"]:
        assert (ROOT / words[3]).is_file()
    else:
        text = (ROOT / words[1]).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words if word.startswith("--"))


def understood(command: Any, words: list[str]) -> None:
    """Options and arguments, and all that is needed; nothing runs."""
    context = None
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, words)
    assert context.args == []
