"""The page of measurements: whole in itself, gone on with, and plain about charts that do not show their claim."""

from __future__ import annotations

import importlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import fit, steps
from benchmarks.cli import app
from benchmarks.plots.heat_map import heat_map
from benchmarks.report import run as running
from benchmarks.report.charts import CHARTS, published_charts, steps_charts
from benchmarks.report.page import drawn, markdown
from benchmarks.report.parts import Measurement, parts

ROOT = Path(__file__).parents[2]


def measured_steps(out: Path, seconds: tuple[float, ...] = (1.0, 2.0, 3.0)) -> dict[str, Any]:
    about = {"counts": [10, 20, 30], "model": "demo", "size": 64, "device": "cpu", "left_out": []}
    row = {"policy": "ours", "slope": 0.1, "intercept": 0.0, "r_squared": 1.0, "seconds": list(seconds)}
    return steps.written({**about, "rows": [row]}, steps.lines, out)


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The report's parts replaced by two quick ones; tells which were measured."""
    measured: list[str] = []

    fitted = fit.run

    def first(*, out: Path, **_: Any) -> Any:
        measured.append("steps")
        return measured_steps(out)

    def second(files: Any, *, out: Path) -> Any:
        measured.append("fit")
        return fitted(files, out=out)

    monkeypatch.setattr(steps, "run", first)
    monkeypatch.setattr(fit, "run", second)
    some = [Measurement("steps", 2, "steps"), Measurement("fit", 3, "fit")]
    monkeypatch.setattr(running, "parts", lambda quick: some)
    return measured


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.names.append(tag)
        self.links += [str(value) for name, value in attributes if name in ("src", "href", "xlink:href")]


def test_one_page_that_needs_nothing_else(tmp_path: Path, two_parts: list[str]) -> None:
    out = tmp_path / "here"
    result = CliRunner().invoke(app, ["report", "--quick", "--out", str(out)])
    assert result.exit_code == 0 and "left: steps, fit; about 5 minutes" in result.output, result.output
    text = (out / "index.html").read_text()
    elements = Elements()
    elements.feed(text)
    assert elements.names.count("svg") == 4 and all(link.startswith("#") for link in elements.links)
    assert "prefers-color-scheme: dark" in text and "var(--ink)" in text and str(tmp_path) not in text
    names = re.findall(r' id="([^"]+)"', text)
    linked = {link[1:] for link in elements.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert linked <= set(names) and all(names.count(one) == 1 for one in linked)
    assert "consciencia-modified, published" in (out / "report.md").read_text()


def test_it_goes_on_where_it_ended(tmp_path: Path, two_parts: list[str]) -> None:
    asked = ["report", "--quick", "--out", str(tmp_path)]
    CliRunner().invoke(app, asked)
    (tmp_path / "parts" / "fit.done").unlink()
    told = CliRunner().invoke(app, asked).output
    assert two_parts == ["steps", "fit", "fit"] and "left: fit; about 3 minutes" in told
    other = tmp_path / "parts" / "about.json"
    other.write_text(json.dumps({**json.loads(other.read_text()), "torch": "0.1"}))
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2 and "holds a report with torch 0.1" in " ".join(refused.output.split())


def test_a_chart_that_fails_its_claim_says_so(tmp_path: Path) -> None:
    report = measured_steps(tmp_path / "steps.md")
    line, _ = steps_charts(report)
    assert line.holds and line.verdict.startswith("Shown: time is a line")
    report["rows"][0]["r_squared"] = 0.5
    line, _ = steps_charts(report)
    assert not line.holds and line.verdict.startswith("NOT shown by these figures: time is a line")


def test_a_quick_report_has_six_charts_or_more_and_is_within_ten_minutes() -> None:
    some = parts(quick=True)
    assert len(some) >= 6 and sum(part.minutes for part in some) <= 10
    assert {part.name for part in (*some, *parts(quick=False))} == {*CHARTS}


def test_each_part_runs_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    for part in {part.command: part for part in (*parts(quick=True), *parts(quick=False))}.values():
        module = importlib.import_module(f"benchmarks.{part.command.split()[0].replace('-', '_')}")
        monkeypatch.setattr(module, "run", lambda *given, **named: asked.update(given=given, **named) or {"rows": []})
        assert part.measured(tmp_path, get_command(app)) == part.kept(tmp_path) == {"rows": []}
    assert asked["source"] == "B" and asked["model"] == "demo" and asked["out"] == tmp_path / "ladder.md"


def test_what_a_bench_has_written_is_not_measured_anew(tmp_path: Path, two_parts: list[str]) -> None:
    known = tmp_path / "known"
    known.mkdir()
    measured_steps(known / "steps.md")
    asked = ["report", "--quick", "--out", str(tmp_path / "out"), "--from"]
    assert "left: fit;" in CliRunner().invoke(app, [*asked, str(known)]).output and two_parts == ["fit"]
    refused = CliRunner().invoke(app, [*asked, str(tmp_path / "none")])
    assert refused.exit_code == 2 and "is no folder" in " ".join(refused.output.split())


def test_a_committed_comparison_that_is_far_off_is_called_not_shown() -> None:
    values = json.loads((ROOT / "benchmarks" / "published.json").read_text(encoding="utf-8"))
    assert len(values["rows"]) == 3 and all(len(row["times"]) == 169 for row in values["rows"])
    values["rows"][0]["agreement"]["median_error"] = 0.2
    scatter, *maps = published_charts(values)
    assert not scatter.holds and len(maps) == 3


def test_the_committed_page_is_small_and_rendered_from_its_json() -> None:
    folder = ROOT / "docs" / "report"
    found = {part.name: kept for part in parts(quick=False) if (kept := part.kept(folder / "parts")) is not None}
    about = json.loads((folder / "parts" / "about.json").read_text(encoding="utf-8"))
    told = markdown(about, parts(quick=False), found, drawn(found))
    assert (folder / "report.md").read_text(encoding="utf-8") == told
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 3_000_000


def test_the_page_opens_with_what_holds_and_its_claims_lead_to_charts(tmp_path: Path, two_parts: list[str]) -> None:
    running.run(tmp_path / "here", False, lambda _: None, get_command(app))
    page = (tmp_path / "here" / "index.html").read_text(encoding="utf-8")
    body = page.partition("<body>")[2]
    assert body.index("What holds") < body.index("<figure")
    aims = re.findall(r'<a href="#([^"]+)"', body)
    assert len(aims) == body.count("<figure") and all(f'<figure id="{aim}">' in body for aim in aims)


def test_ratios_have_1_in_the_middle_of_their_scale() -> None:
    drawn = heat_map("", {(64, 64): 0.5, (64, 128): 1.0, (128, 64): 1.1}, ratios=True)
    (image,) = drawn.axes[0].images
    low, high = image.get_clim()
    assert low == -high < 0
    blue, white, red = (image.cmap(image.norm(value))[:3] for value in (low, 0.0, high))
    assert min(white) > 0.9 and blue[2] > blue[0] and red[0] > red[2]
