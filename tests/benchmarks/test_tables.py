"""Tables of figures come from committed JSON, rendered anew they are what is there; or they were made once."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import comfyui_decodes
import fault_table
import pytest
import webui_plans
from typer.testing import CliRunner

from benchmarks import (
    cards,
    computed,
    end_to_end,
    gpu,
    h100_steps,
    ladder,
    max_size,
    peers,
    plans,
    published,
    schedule,
    tables,
    todays_memory,
    todays_models,
    vae,
)
from benchmarks.cli import app
from sd_lowvram.errors import BadInputError

ROOT = Path(__file__).parents[2]

RENDERED: dict[str, Callable[[Any], Iterable[str]]] = {
    "budgets_on_card": lambda values: _on_card("plans").budget_lines(values),
    "cards": cards.lines,
    "cards_sdxl": cards.lines,
    "comfyui_decodes": comfyui_decodes.lines,
    "end_to_end": end_to_end.lines,
    "faults": lambda values: fault_table.lines(values["rows"]),
    "ladder_b": ladder.lines,
    "ladder_e": ladder.lines,
    "h100_steps": h100_steps.lines,
    "largest_rtx2070": max_size.lines,
    "measured/nvidia-h100-80gb-hbm3": gpu.lines,
    "measured/plans-on-h100": lambda values: _on_card("plans").lines(values),
    "peers": peers.lines,
    "peers_on_card": peers.lines,
    "pipelines": lambda values: _script("others/over_pipelines.py").lines(values["rows"]),
    "plans": plans.lines,
    "plans_on_card": lambda values: _on_card("plans").lines(values),
    "published": published.lines,
    "schedule": schedule.lines,
    "simulated/simulated-gpu": lambda values: _on_card("bench").lines(values),
    "todays_memory": todays_memory.lines,
    "todays_models": todays_models.lines,
    "todays_models_laptop": todays_models.lines,
    "vae": vae.lines,
    "vae_flux": vae.lines,
    "vae_qwen_image": vae.lines,
    "webui_plans": webui_plans.lines,
}
"""By the file's name in benchmarks/."""
ONCE = re.compile(r"\n\n\*Made once\. The script is `((?:benchmarks|tests)/\S+\.py)` in commit ([0-9a-f]{7,})\.\*\n$")
"""The end of a table that no script of the tree writes."""
BY_PARTS = ("measured/", "simulated/")
"""Folders of tables that say part by part when and where they were made."""


def _on_card(what: str) -> Any:
    """The script that makes it, which lies with the tests of a simulated card."""
    folder = "simulated_gpu" if what == "plans" else "benchmarks/simulated_gpu"
    return _script(f"{folder}/{what}_on_card.py")


def _script(place: str) -> Any:
    """A script among the tests."""
    found = importlib.util.spec_from_file_location(f"table_of_{Path(place).stem}", ROOT / "tests" / place)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    with mock.patch.object(sys, "path", [*sys.path]):
        found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RENDERED)
def test_the_json_renders_the_committed_table(name: str) -> None:
    values = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    committed = (ROOT / "benchmarks" / f"{name}.md").read_text(encoding="utf-8")
    lines = RENDERED[name]
    rendered = lines(values) if name.startswith(BY_PARTS) else tables.whole(values, lines)
    assert "\n".join(rendered) + "\n" == committed


FOLDER = ROOT / "benchmarks"
FILES = [*FOLDER.glob("*.md"), *(one for place in BY_PARTS for one in (FOLDER / place).glob("*.md"))]
TEXTS = {file.relative_to(FOLDER).with_suffix("").as_posix(): file.read_text(encoding="utf-8") for file in FILES}
MADE_ONCE = {name: found for name, text in TEXTS.items() if (found := ONCE.search(text))}


def test_every_table_is_rendered_or_was_made_once() -> None:
    assert {*TEXTS} == {*RENDERED, *MADE_ONCE} and not RENDERED.keys() & MADE_ONCE.keys()


def in_history(*words: str) -> bool:
    """True if git has it; skip the test where the history is not whole."""

    def told(*asked: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *asked], cwd=ROOT, capture_output=True, text=True, check=False)

    try:
        if told("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
            pytest.skip("the history is not here")
    except OSError:
        pytest.skip("git is not here")
    return told(*words).returncode == 0


@pytest.mark.parametrize("name", MADE_ONCE)
def test_the_script_of_a_table_that_was_made_once_is_in_the_history(name: str) -> None:
    script, number = MADE_ONCE[name].groups()
    assert in_history("cat-file", "-e", f"{number}:{script}")


@pytest.mark.parametrize("name", [name for name in TEXTS if not name.startswith(BY_PARTS)])
def test_every_table_says_when_where_and_how_it_was_made(name: str) -> None:
    number = r"(?:([0-9a-f]{7,})|not recorded(?: \([0-9a-f]{7,} and changes\))?)"
    made = rf"\n\*Made 20\d\d-\d\d-\d\d, commit {number}, processor or card .+, torch .+, by `.+`\."
    found = re.search(made, TEXTS[name])
    assert found is not None and (found[1] is None or in_history("merge-base", "--is-ancestor", found[1], "HEAD"))


def test_times_of_a_simulated_card_are_in_no_table() -> None:
    text = (ROOT / "benchmarks" / "simulated" / "simulated-gpu.md").read_text(encoding="utf-8")
    heads = re.findall(r"^\|(.*)\|\n\|-", text, re.MULTILINE)
    assert (
        len(heads) >= 6
        and not re.search(r"\b(m?s|times as fast)\b|/ resident|holds", " ".join(heads))
        and "holds" not in text
    )


TABLE = re.compile(r"^\|.*\n\|[-| ]+\|\n(?:\|.*\n)+", re.MULTILINE)


def test_every_table_of_figures_in_readme_and_docs_is_one_of_these() -> None:
    """Word for word. Versions of hosts are no figures; the suites' own list holds that table."""
    measured = [file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks").glob("*.md")]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    tables = [found[0] for page in pages for found in TABLE.finditer(page.read_text(encoding="utf-8"))]
    tables = [one for one in tables if not one.startswith("| host |")]
    figures = [one for one in tables if re.search(r"\| *[\d.]+(e-?\d+)?( %| s| [MG]iB| dB)?(?=,| *\|)", one)]
    assert len(figures) >= 7
    for one in figures:
        assert any(one in text for text in measured), one


def filled(out: Path, *cases: int, broken: int | None = None) -> dict[str, Any]:
    """A table with a row for each of ``cases``; one of them is interrupted."""

    def found(case: int) -> dict[str, Any]:
        if case == broken:
            raise KeyboardInterrupt
        return {"found": case}

    def lines(report: dict[str, Any]) -> Iterable[str]:
        return [str(row["found"]) for row in report["rows"]]

    return tables.filled({}, [{"case": case} for case in cases], found, lines, out, "cases")


def test_rows_that_were_there_keep_when_they_were_made(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    earlier = filled(out, 1)
    earlier["made"]["date"] = earlier["rows"][0]["made"]["date"] = "2026-01-01"
    out.with_suffix(".json").write_text(json.dumps(earlier))
    assert filled(out, 1) == earlier and "Made 2026-01-01" in out.read_text(encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        filled(out, 1, 2, 3, broken=3)
    whole = filled(out, 1, 2, 3)
    assert whole["made"]["date"] != "2026-01-01" and whole["earlier"] == [earlier["made"]]
    assert [row["made"]["date"] == "2026-01-01" for row in whole["rows"]] == [True, False, False]
    assert "Some rows: 2026-01-01, commit" in out.read_text(encoding="utf-8")
    assert filled(out, 1, 2, 3) == whole


def test_rows_that_do_not_say_when_they_were_made_are_not_of_today(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    rows = [{"case": 1, "found": 1}]
    out.with_suffix(".json").write_text(json.dumps({"rows": rows}))
    assert filled(out, 1) == {"rows": rows, "made": {}}
    assert "*Made not recorded, commit not recorded," in out.read_text(encoding="utf-8")
    out.with_suffix(".json").write_text(json.dumps({"rows": rows}))
    assert filled(out, 1, 2)["earlier"] == [{"date": "not recorded", "commit": "not recorded"}]


def test_computed_tables_are_made_anew_by_one_command_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, broken = [], [2048]

    def row(card: str, model: str, size: int) -> dict[str, Any]:
        if size in broken:
            raise BadInputError("interrupted")
        rows.append((model, size))
        sizes = ("peak", "reserved", "vram", "ram")
        return {
            "bound_bytes": None, "host_bytes": 0, "seconds": 1.0, "searching_seconds": 0.1,
            **{f"minimum_{name}_bytes": 1 for name in sizes},
        }  # fmt: skip

    def told(*words: str) -> str:
        return CliRunner().invoke(app, ["tables", *words, "--out", str(tmp_path)]).output

    monkeypatch.setattr(plans, "_row", row)
    monkeypatch.setattr(computed, "TABLES", {"one": "plans --model sd21", "two": "plans --model sdxl"})
    for module in (computed, tables):
        monkeypatch.setattr(module, "commit", lambda: "abcdef1")
    (tmp_path / "two.json").write_text('{"made": {"date": "2026-01-01", "seconds": 90}}')
    assert "two, 2 of 2: stays of 2026-01-01" in told("--minutes", "1")
    assert "one: python" not in told("one") and rows == [("sd21", 768)]
    assert "one, 1 of 2: is of commit abcdef1" in told() and rows[1:] == [("sdxl", 1024)]
    assert json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))["made"]["date"] == "2026-01-01"
    broken.clear()
    told()
    assert rows[2:] == [("sdxl", 2048), ("sdxl", 4096)] and not (tmp_path / "begun").exists()
    text = (tmp_path / "two.md").read_text(encoding="utf-8")
    assert (
        "commit abcdef1" in text
        and text.count("| sdxl |") == 3
        and "by `python -m benchmarks plans --model sdxl`" in text
    )


def test_no_time_begins_below_zero() -> None:
    """A line through seconds of a busy machine may; the table of policies leaves such figures out."""
    told = (ROOT / "benchmarks" / "policies_here.md").read_text(encoding="utf-8")
    seconds, fits = told.split("## Pixels against time")
    assert not re.findall(r"\| -\d[\d.]* \|", seconds + fits.partition("## Seconds by steps")[2])
