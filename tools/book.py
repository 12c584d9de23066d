"""What MkDocs builds besides docs/: pages made from the code, and files of the repository as pages (``mkdocs.yml``).

Pages link to files of the repository where these lie, so that links work in a clone too; here links are turned to where
the file is in the book.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

AS_PAGES = {
    "README.md": "overview.md",
    "sd_lowvram/demo/README.md": "sd_lowvram/demo/model.md",
    "benchmarks/published_times/README.md": "benchmarks/published_times/times.md",
    "tools/demo/students.md": "benchmarks/students.md",
    "tools/demo/students_one_seed.md": "benchmarks/students_one_seed.md",
    **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
    **{str(file.relative_to(ROOT)): str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("benchmarks/**/*.md"))
       if file.name != "README.md"},
}  # fmt: skip
"""Files of the repository that are pages of the book, and where they are there."""


def knobs_page() -> Iterator[str]:
    """Every knob, from its declaration."""
    from sd_lowvram.commands.knobs import fidelity_words
    from sd_lowvram.settings import knobs

    yield "# Knobs"
    yield ""
    yield (
        "You set a knob to choose yourself what the plan would choose. Each knob is an option of `generate` and `plan` "
        "(`--vae-tiles exact`) and a field of `Settings`. Where hosts allow it, it is also an input of the nodes "
        "and a control of the panel."
    )
    yield from ("", "| knob | what it sets | fidelity |", "|---|---|---|")
    for name, knob in knobs().items():
        yield f"| [{name}](#{name}) | {knob.help} | {fidelity_words(knob)} |"
    yield ""
    yield (
        "Fidelity compares with the model as you loaded it. *identical*: the same bits. *identical up to rounding*: "
        "the same arithmetic in another order or a wider type. *approximate*: another picture, however close. No plan "
        "uses such a setting unless you allow it."
    )
    for name, knob in knobs().items():
        number = f"up to {knob.maximum} {knob.unit}".strip()
        values = ", ".join(knob.choices) or {int: number, bool: "on, off"}[knob.type]
        yield from ("", f"## {name}", "", f"{knob.help[0].upper()}{knob.help[1:]}.", "")
        yield f"- **values**: {values}"
        yield f"- **fidelity**: {fidelity_words(knob)}"
        if knob.when:
            yield f"- **when it helps; what it costs**: {knob.when}"
        if knob.stages:
            yield f"- **acts in**: {', '.join(knob.stages)}"
        excluded = sorted({act.value for act in knob.excludes})
        if excluded:
            yield f"- **not with a knob that** {'; '.join(excluded)}"


def command_line_page() -> Iterator[str]:
    """Every command with all its options, from the commands themselves."""
    import typer

    from sd_lowvram.cli import app

    yield "# Command line"
    yield ""
    yield "You find here every command with all its options. Sizes are written as people write them: `4GB`, `3.5 GiB`,"
    yield "`4096` (MiB). Exit codes: [Errors](errors.md)."
    yield from _commands(typer.main.get_command(app), "sd-lowvram")


def _commands(command: Any, path: str) -> Iterator[str]:
    """``command``, or where it is a group the commands in it."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")
    if not hasattr(command, "commands"):
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        places = " ".join(one.metavar or one.name.upper() for one in arguments)
        yield from ("", f"## {path}", "", f"`{path} {places}`".replace(" `", "`"), "", _cell(command.help or ""))
        panels: dict[str, list[Any]] = {}
        for one in command.params:
            panels.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(one)
        for panel, options in panels.items():
            yield from ("", f"**{panel}**", "", "| | |", "|---|---|")
            yield from (f"| {_spelled(one)} | {_cell(_help(one))} |" for one in options)


def _spelled(one: Any) -> str:
    if one.param_type_name == "argument":
        return f"`{_cell(one.metavar or one.name.upper())}`"
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    return f"{names} `{_cell(one.metavar)}`" if one.metavar else names


def _help(one: Any) -> str:
    told = one.help or ""
    stated = isinstance(one.default, (int, str)) and one.default not in (True, False, "")
    return f"{told} Default: {one.default}." if stated else told


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


GENERATED: dict[str, Callable[[], Iterator[str]]] = {"knobs.md": knobs_page, "command-line.md": command_line_page}


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks this for the book's files."""
    from mkdocs.structure.files import File

    for place, lines in GENERATED.items():
        files.append(File.generated(config, place, content="\n".join(lines()) + "\n"))
    for source, place in AS_PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    for linked in sorted({one for source in AS_PAGES for one in _pictures(ROOT / source)}):
        files.append(File.generated(config, linked, abs_src_path=str(ROOT / linked)))
    return files


def _pictures(source: Path) -> Iterator[str]:
    """Pictures outside docs/ that a file of the repository shows."""
    for link in re.findall(r"!\[[^]]*\]\(([^)#\s]+)\)", source.read_text(encoding="utf-8")):
        place = (source.parent / link).resolve()
        if place.is_relative_to(ROOT) and not place.is_relative_to(ROOT / "docs"):
            yield str(place.relative_to(ROOT))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs asks this for a page's text: links go to where a file of the repository is in the book."""
    here = page.file.src_uri
    origin = next((source for source, place in AS_PAGES.items() if place == here), f"docs/{here}")

    def turned(found: re.Match[str]) -> str:
        target, anchor = found[2], found[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if "://" in target or target.startswith(("mailto:", "#")):
            return found[0]
        place = AS_PAGES.get(file, file.removeprefix("docs/"))
        return f"{found[1]}({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    return re.sub(r"(\[[^]]*\])\(([^)#\s]+)(#[^)\s]*)?\)", turned, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """MkDocs asks this for a page's HTML: roles of docstrings (``:func:``) are names there."""
    return re.sub(r":(?:func|class|mod|data|attr|meth):(<code>)~?", r"\1", content)
