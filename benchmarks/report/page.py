"""The page: one HTML file that needs nothing else, and the same in Markdown. Neither holds a path or a host's name."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..plots.style import as_svg
from ..tables import origin_line
from .charts import CHARTS, Chart
from .parts import Measurement

_STYLE = """
:root { --ink: #2b2f36; --paper: #ffffff; --line: #d5d9df; --shown: #2f7d4f; --not: #b3202c;
  --first: #33567f; --sixth: #b3202c; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --paper: #16181c; --line: #3a3f47; --shown: #6fce96; --not: #ff8087;
    --first: #a9c6e8; --sixth: #ff8087; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; min-width: 32rem; max-width: 58rem; height: auto; }
svg text { font-family: system-ui, sans-serif; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figcaption { position: sticky; left: 0; }
li.shown a, figcaption.shown { color: var(--shown); }
li.not a, figcaption.not { color: var(--not); }
.wide { overflow-x: auto; }
.wide td { white-space: nowrap; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { border: 1px solid var(--line); padding: 0.2rem 0.5rem; text-align: left; }
code { font-size: 0.9em; }
"""


def drawn(found: Mapping[str, Any]) -> dict[str, list[Chart]]:
    """The charts of the parts that are there, by name."""
    return {name: CHARTS[name](report) for name, report in found.items()}


def page(
    about: Mapping[str, Any], parts: Sequence[Measurement], found: Mapping[str, Any], charts: Mapping[str, Any]
) -> str:
    """The HTML.

    Args:
        about: versions and the machine.
        found: what was measured, by the part's name; charts: drawn of it.
    """
    body = ["<h1>sd-lowvram on this machine</h1>", *_summary(charts), _paragraph(_machine(about))]
    body += [_paragraph(_lacking(parts, found))] if len(found) < len(parts) else []
    for part in parts:
        if part.name not in found:
            continue
        heading, *rest = part.lines(found[part.name])
        body.append(f"<h2>{html.escape(heading.lstrip('# '))}</h2>")
        for chart in charts[part.name]:
            shown = "shown" if chart.holds else "not"
            caption = f'<figcaption class="{shown}">{html.escape(chart.verdict)}</figcaption>'
            caption += _paragraph(chart.why) if chart.why else ""
            drawing = as_svg(chart.figure, f"{part.name}-{chart.name}")
            body.append(f'<figure id="{part.name}-{chart.name}">{drawing}{caption}</figure>')
        body += _as_html(rest)
        body.append(_paragraph(origin_line(found[part.name]).strip("*").replace("`", "")))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>sd-lowvram: report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def markdown(
    about: Mapping[str, Any], parts: Sequence[Measurement], found: Mapping[str, Any], charts: Mapping[str, Any]
) -> str:
    """The same without pictures."""
    told = ["# sd-lowvram on this machine", "", _machine(about)]
    told += ["", _lacking(parts, found)] if len(found) < len(parts) else []
    for part in parts:
        if part.name in found:
            heading, *rest = part.lines(found[part.name])
            verdicts = [f"- {chart.verdict} {chart.why}".rstrip() for chart in charts[part.name]]
            told += ["", f"#{heading}", "", *verdicts, *rest, "", origin_line(found[part.name])]
    return "\n".join(told) + "\n"


def _machine(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in about.items())


def _lacking(parts: Sequence[Measurement], found: Mapping[str, Any]) -> str:
    names = ", ".join(part.name for part in parts if part.name not in found)
    return f"Not measured yet: {names}. The command that made this page goes on with them."


def _summary(charts: Mapping[str, Sequence[Chart]]) -> Iterator[str]:
    every = [(f"{part}-{chart.name}", chart) for part, some in charts.items() for chart in some]
    for holds, shown, heading in ((True, "shown", "What holds"), (False, "not", "What these figures do not show")):
        some = [(place, chart) for place, chart in every if chart.holds == holds]
        if some:
            claims = (f'<li class="{shown}"><a href="#{at}">{html.escape(one.claim)}</a></li>' for at, one in some)
            yield f"<h2>{heading}: {len(some)} of {len(every)}</h2><ul>{''.join(claims)}</ul>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _as_html(lines: Iterable[str]) -> Iterator[str]:
    """Headings, paragraphs and tables of the Markdown that measurements write."""
    for is_table, some in itertools.groupby(lines, key=lambda line: line.startswith("|")):
        if is_table:
            yield _table(list(some))
        else:
            yield from (_heading_or_paragraph(line) for line in some if line)


def _heading_or_paragraph(line: str) -> str:
    if line.startswith("#"):
        return f"<h3>{html.escape(line.lstrip('# '))}</h3>"
    return _paragraph(line.replace("`", "").replace("*", ""))


def _table(lines: Sequence[str]) -> str:
    heads, _, *others = ([html.escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines)
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    cells = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in others)
    return f'<div class="wide"><table><tr>{head}</tr>{cells}</table></div>'
