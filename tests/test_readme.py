"""README and docs/ say what the code says: knobs, devices, models, links, and every block of Python runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from sd_lowvram.commands.knobs import command_line_knobs, fidelity_words
from sd_lowvram.devices import support
from sd_lowvram.settings import knobs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

LEVELS = (support.TESTED, support.SIMULATED, support.UNTESTED)


@pytest.fixture(scope="module")
def book() -> Any:
    """What makes the book's pages: tools/book.py."""
    found = importlib.util.spec_from_file_location("book", ROOT / "tools" / "book.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_readme_is_read_in_minutes() -> None:
    assert len(README.splitlines()) <= 180


@pytest.mark.skipif(shutil.which("make") is None or os.name == "nt", reason="needs make and a shell")
@pytest.mark.parametrize("complete", [True, False])
def test_an_environment_that_is_complete_is_not_installed_into(tmp_path: Path, complete: bool) -> None:
    """README's install, then its first command: torch comes once."""
    program, log = tmp_path / "bin" / "python", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\ncase "$1" in -c) exit {int(not complete)};; esac\n')
    program.chmod(0o755)
    made = ["make", "picture", f"VENV={tmp_path}", f"PYTHON={sys.executable}", "PROMPT=a red apple"]
    for _ in range(2):
        subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    commands = [line for line in log.read_text().splitlines() if line.startswith("-m")]
    installed = [line for line in commands if line.startswith("-m pip")]
    assert commands[-1] == "-m sd_lowvram generate a red apple"
    assert [line.split()[-1] for line in installed] == ([] if complete else ["torch", ".[standalone]"])


def test_the_package_says_that_it_is_typed() -> None:
    """A file that ships with it, as the classifier promises."""
    assert '"Typing :: Typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (ROOT / "sd_lowvram" / "py.typed").is_file()


def test_the_help_of_optimize_names_the_models_that_are_served() -> None:
    from sd_lowvram import optimize
    from sd_lowvram.models.support import WHOLE

    assert WHOLE.replace(" and ", " or ") in " ".join((optimize.__doc__ or "").split())


def test_the_page_of_knobs_is_made_of_their_declarations(book: Any) -> None:
    _, *told = "\n".join(book.knobs_page()).split("\n## ")
    assert [one.partition("\n")[0] for one in told] == list(knobs())
    for one, (name, knob) in zip(told, knobs().items(), strict=True):
        number = f"up to {knob.maximum} {knob.unit}".strip()
        values = ", ".join(knob.choices) or {int: number, bool: "on, off"}[knob.type]
        assert f"- **values**: {values}\n- **fidelity**: {fidelity_words(knob)}\n" in one, name
        assert knob.when and f"what it costs**: {knob.when}\n" in one, name
        assert knob.help.lower() in one.lower(), name


def test_the_page_of_commands_has_every_option(book: Any) -> None:
    page = "\n".join(book.command_line_page())
    for name in command_line_knobs():
        assert page.count(f"`--{name.replace('_', '-')}`") >= 2, name  # generate, plan
    assert "## sd-lowvram plan" in page


ABSENT = [
    ROOT / room for room in ("benchmarks", "sd_lowvram/unets", "sd_lowvram/batches") if not (ROOT / room).exists()
]
"""What the package runs without: links into it lead nowhere then."""
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path, book: Any) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        made = page.parent == ROOT / "docs" and link in book.GENERATED
        place = (page.parent / link).resolve()
        made = made or any(place.is_relative_to(room) for room in ABSENT)
        assert made or "://" in link or place.exists(), f"{page.name}: {link}"


def test_every_page_is_in_the_book() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert all(re.search(rf"\s{page.name}$", contents, re.MULTILINE) for page in (ROOT / "docs").glob("*.md"))


def test_what_may_be_expected_of_devices_is_what_doctor_tells() -> None:
    known = [one for one in vars(support).values() if isinstance(one, support.Support)]
    assert len(known) == 7
    for one in known:
        rows = [line.split("|") for line in README.splitlines() if line.startswith("| ")]
        levels = [row[2].strip() for row in rows if one.name in row[1] and row[2].strip() in LEVELS]
        assert levels == [one.level], one.name


HOSTS = {"ComfyUI": "test_comfyui*.py", "AUTOMATIC1111, Forge, Forge Neo": "test_webui*.py"}
"""The tests in real hosts, by the heads of their columns."""
UNTRIED = ("should work, untested", "untested", "no")


@pytest.mark.parametrize("host", HOSTS)
def test_what_the_table_of_models_says_of_a_host_is_what_its_tests_run(host: str) -> None:
    head, *lines = (line.split(" | ") for line in README.partition("| model | ")[2].partition("\n\n")[0].splitlines())
    column = [cell.strip("| ") for cell in head].index(host) + 1
    cells = {line[0].strip("| "): line[column].strip("| ") for line in lines[1:]}
    tried = {row for file in (ROOT / "tests" / "hosts").glob(HOSTS[host]) for row in rows_served(file)}
    assert {row for row, cell in cells.items() if cell not in UNTRIED} == tried


def test_the_table_of_hosts_is_the_list_of_the_suites() -> None:
    tried = json.loads((ROOT / "tests" / "hosts" / "tried.json").read_text(encoding="utf-8"))
    table = README.partition("| host | version tried | date | what was run |\n")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]
    assert rows == [list(one.values()) for one in tried] and len(rows) == 5


def rows_served(file: Path) -> Iterator[str]:
    """The rows that tests in ``file`` are marked with, or one of their parameters is."""
    for test in vars(importlib.import_module(file.stem)).values():
        marks = list(getattr(test, "pytestmark", ()))
        lists = [mark.args[1] for mark in marks if mark.name == "parametrize"]
        marks += [mark for values in lists for one in values for mark in getattr(one, "marks", ())]
        yield from (mark.args[0] for mark in marks if mark.name == "serves")


PYTHON = [
    (page.name, block)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
]

_PLANNED = {'"4GB"': '"3GB"', "1024": "512", '"a red apple"': '"a blue car"'}
OTHER_VALUES = (_PLANNED, _PLANNED, {'"a red apple"': '"a blue car"', "manual_seed(1)": "manual_seed(2)"})
"""For each Python block of README and docs, in their order: what stands in it the second time."""


def test_every_block_of_python_is_run() -> None:
    """No page has a line of Python in a block that is not marked as such."""
    assert len(PYTHON) == len(OTHER_VALUES)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```python\n.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for block in re.findall(r"^ *```.*?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
            python = re.search(r"^\s*(import|from|with|pipe)\b|sd_lowvram\.\w+\(", block, re.MULTILINE)
            assert python is None, f"{page.name}: {block}"


@pytest.mark.slow(10)
@pytest.mark.parametrize("number", range(len(OTHER_VALUES)))
def test_blocks_of_python_run_as_they_are_printed_and_with_other_values(number: int, tmp_path, monkeypatch) -> None:
    """``pipe`` is a small pipeline with random weights. Where it goes on from a file, the first run is ended."""
    monkeypatch.chdir(tmp_path)
    _, block = PYTHON[number]
    other = block
    for printed, value in OTHER_VALUES[number].items():
        assert printed in other, f"{printed} does not stand in block {number}"
        other = other.replace(printed, value)
    pipe, fresh = families.plain("sd15"), families.plain("sd15")
    for one in (pipe, fresh):  # a call without a seed gets one: planning draws numbers, too
        monkeypatch.setattr(one, "check_inputs", lambda *_, **__: torch.manual_seed(0))
    expected = [picture_of(text, fresh) for text in (block, other)]
    assert expected[0] != expected[1]
    if "resumable" in block:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(pipe.vae, "decode", interrupted)
            exec(block, {"pipe": pipe})
        (left,) = tmp_path.glob("*.safetensors")
        with pytest.warns(UserWarning, match="is of another call"):
            assert picture_of(other, pipe) == expected[1]
        assert not left.exists()
    assert [picture_of(text, pipe) for text in (block, other)] == expected


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def picture_of(block: str, pipe: Any) -> bytes:
    """The bytes of ``image`` when ``block`` has run on ``pipe``."""
    names: dict[str, Any] = {"pipe": pipe}
    exec(block, names)
    pixels: bytes = names["image"].tobytes()
    return pixels
