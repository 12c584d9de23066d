"""``python -m benchmarks`` as it is called: its names, and what it refuses before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import ENVIRONMENT, MAIN
from forked import forks_of

_BENCHMARKS = "from benchmarks.__main__ import main; main()"
_WARM = "import benchmarks.cli, sd_lowvram.cli"


@pytest.fixture(scope="module")
def forks() -> Any:
    with forks_of(_WARM, ENVIRONMENT) as run:
        yield run


def test_help_lists_the_names(forks: Any, tmp_path: Path) -> None:
    told = forks(_BENCHMARKS, "--help", folder=tmp_path)
    assert told.returncode == 0 and all(name in told.stdout for name in ("end-to-end", "ladder", "tables", "gpu"))
    one = forks(_BENCHMARKS, "ladder", "--help", folder=tmp_path)
    assert one.returncode == 0 and "python -m benchmarks ladder" in one.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["banana"], "no such command 'banana'; python -m benchmarks --help shows all options"),
        (["plans", "--model", "banana"], "--model 'banana' is unknown: choose one of sd15"),
        (["end-to-end", "--budgets", "0"], "--budgets 0 must be at least 1"),
        (["schedule", "--width", "7"], "--width 7 is not a multiple of 8"),
    ],
)
def test_bad_words_in_one_line(forks: Any, tmp_path: Path, words: list[str], message: str) -> None:
    done = forks(_BENCHMARKS, *words, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("name", ["bench", "report"])
def test_the_package_has_no_such_command(forks: Any, tmp_path: Path, name: str) -> None:
    assert f"no such command '{name}'" in forks(MAIN, name, folder=tmp_path).stderr
