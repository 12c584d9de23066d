"""Tables of figures come from committed JSON: rendered anew they are what is there."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import comfyui_decodes
import fault_table
import pytest
import webui_plans

from benchmarks import (
    cards,
    end_to_end,
    fastest,
    finite,
    first_steps,
    gpu,
    half_products,
    ladder,
    ladder_on_card,
    max_size,
    peers,
    phones,
    plans,
    published,
    rereading,
    schedule,
    smaller_unets,
    storage,
    tables,
    todays_blocks,
    todays_memory,
    todays_models,
    vae,
    winograd,
)

ROOT = Path(__file__).parents[2]

RENDERED: dict[str, Callable[[Any], Iterable[str]]] = {
    "cards": cards.lines,
    "cards_sdxl": cards.lines,
    "comfyui_decodes": comfyui_decodes.lines,
    "end_to_end": end_to_end.lines,
    "fastest": fastest.lines,
    "faults": lambda values: fault_table.lines(values["rows"]),
    "finite": finite.lines,
    "first_steps": first_steps.lines,
    "half_products": half_products.lines,
    "ladder_b": ladder.lines,
    "ladder_e": ladder.lines,
    "ladder_on_card": ladder_on_card.lines,
    "largest_demo": max_size.lines,
    "largest_rtx2070": max_size.lines,
    "measured/nvidia-h100-80gb-hbm3": gpu.lines,
    "measured/plans-on-h100": lambda values: _on_card("plans").lines(values),
    "peers": peers.lines,
    "phones": phones.lines,
    "plans": plans.lines,
    "plans_on_card": lambda values: _on_card("plans").lines(values),
    "published": published.lines,
    "rereading": rereading.lines,
    "schedule": schedule.lines,
    "simulated/simulated-gpu": lambda values: _on_card("bench").lines(values),
    "storage": storage.lines,
    "todays_blocks": todays_blocks.SHEET.lines,
    "todays_memory": todays_memory.lines,
    "todays_models": todays_models.lines,
    "todays_models_rtx2060": todays_models.lines,
    "unets": smaller_unets.lines,
    "vae": vae.lines,
    "vae_flux": vae.lines,
    "vae_qwen_image": vae.lines,
    "webui_plans": webui_plans.lines,
    "winograd": winograd.lines,
}
"""By the file's name in benchmarks/."""
BY_PARTS = ("measured/", "simulated/")
"""Folders of tables that say part by part when and where they were made."""


def _on_card(what: str) -> Any:
    """The script that makes it, which lies with the tests of a simulated card."""
    folder = "simulated_gpu" if what == "plans" else "benchmarks/simulated_gpu"
    place = ROOT / "tests" / folder / f"{what}_on_card.py"
    found = importlib.util.spec_from_file_location(f"table_of_{what}", place)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RENDERED)
def test_the_json_renders_the_committed_table(name: str) -> None:
    values = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    committed = (ROOT / "benchmarks" / f"{name}.md").read_text(encoding="utf-8")
    lines = RENDERED[name]
    rendered = lines(values) if name.startswith(BY_PARTS) else tables.whole(values, lines)
    assert "\n".join(rendered) + "\n" == committed


def test_every_table_of_measurements_is_rendered() -> None:
    folder = ROOT / "benchmarks"
    files = [*folder.glob("*.md"), *(one for place in BY_PARTS for one in (folder / place).glob("*.md"))]
    assert {file.relative_to(folder).with_suffix("").as_posix() for file in files} == {*RENDERED}


@pytest.mark.parametrize("name", [name for name in RENDERED if not name.startswith(BY_PARTS)])
def test_every_table_says_when_where_and_how_it_was_made(name: str) -> None:
    text = (ROOT / "benchmarks" / f"{name}.md").read_text(encoding="utf-8")
    assert re.search(
        r"\n\*Made 20\d\d-\d\d-\d\d, commit [0-9a-f]{7,}\+?, processor or card .+, torch .+, by `.+`\.", text
    )


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
    """Word for word."""
    measured = [file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks").glob("*.md")]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    tables = [found[0] for page in pages for found in TABLE.finditer(page.read_text(encoding="utf-8"))]
    figures = [one for one in tables if re.search(r"\| *[\d.]+(e-?\d+)?( %| s| [MG]iB| dB)?(?=,| *\|)", one)]
    assert len(figures) >= 7
    for one in figures:
        assert any(one in text for text in measured), one


def test_rows_that_were_there_keep_when_they_were_made(tmp_path: Path) -> None:
    def lines(report: dict[str, Any]) -> Iterable[str]:
        return [str(row["found"]) for row in report["rows"]]

    def made(*cases: int) -> dict[str, Any]:
        each = [{"case": case} for case in cases]
        return tables.filled({}, each, lambda case: {"found": case}, lines, out, "cases")

    out = tmp_path / "table.md"
    earlier = made(1)
    earlier["made"]["date"] = "2026-01-01"
    out.with_suffix(".json").write_text(json.dumps(earlier))
    assert made(1) == earlier and "Made 2026-01-01" in out.read_text(encoding="utf-8")
    assert made(1, 2)["made"]["date"] != "2026-01-01"
    assert "Some rows: 2026-01-01, commit" in out.read_text(encoding="utf-8")
    assert made(1, 2)["earlier"] == [earlier["made"]]
