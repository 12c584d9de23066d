"""Docstrings begin with a verb or a noun, and words that readers stumbled over do not come back."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import wording

ROOT = Path(__file__).parents[1]
WORDS = json.loads((ROOT / "tests" / "data" / "words.json").read_text(encoding="utf-8"))
PACKAGES = ("sd_lowvram", "nodes", "webui_ext", "scripts", "benchmarks")
CODE = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for folder in ("docs", "web/docs") for page in (ROOT / folder).glob("*.md"))
SPOKEN = sorted(file for package in ("sd_lowvram", "nodes", "webui_ext") for file in (ROOT / package).rglob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sentences(code: str) -> list[str]:
    """The strings of some code that have a space in them, without docstrings."""
    nodes = list(ast.walk(ast.parse(code)))
    unspoken = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in unspoken)
    return [node.value for node in strings if isinstance(node.value, str) and " " in node.value]


def words(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(WORDS[name])})\b", re.IGNORECASE)


def texts(files: list[Path]) -> dict[str, str]:
    named = {file.relative_to(ROOT).as_posix(): file for file in files}
    return {name: file.read_text(encoding="utf-8") for name, file in named.items() if name not in WORDS["not yet"]}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = []
    for name, code in texts(CODE).items():
        for node in ast.walk(ast.parse(code)):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            first = (text or "").partition(" ")[0].strip("`*,.:\n")
            if first in WORDS["first words that are no subject"]:
                wrong.append(f"{name}: {getattr(node, 'name', 'the module')}: {first}")
    assert not wrong


def test_pages_have_none_of_the_words_that_no_longer_occur() -> None:
    pattern = words("words that no longer occur")
    assert not {name: found for name, text in texts(PAGES).items() if (found := pattern.findall(text))}


def test_sentences_are_those_of_the_snapshot() -> None:
    """A sentence is stored once, so that tests of behaviour need not hold its words."""
    now, stored = set(wording.sentences()), set(json.loads(wording.FILE.read_text(encoding="utf-8")))
    whole = all((ROOT / "sd_lowvram" / part).is_dir() for part in ("batches", "unets"))
    assert not (now ^ stored if whole else now - stored), "make wording stores the sentences of now"


def test_sentences_that_people_read_have_none_of_the_words_that_the_program_does_not_say() -> None:
    pattern = words("words that the program does not say")
    said = [f"{name}: {one}" for name, code in texts(SPOKEN).items() for one in sentences(code) if pattern.search(one)]
    assert not said
