"""Sentences of errors, help and reports: ``make wording`` writes them into the snapshot.

``tests/data/wording.json`` holds each sentence of the code once, with ``{}`` for what is filled in. Tests of behaviour
hold the class, the values and the remedy of a message; a changed sentence changes this file, and nothing else.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "data" / "wording.json"
PACKAGES = ("sd_lowvram", "nodes", "webui_ext", "scripts")
SENTENCE = re.compile(r"[A-Za-z]{2,},? [a-z]+,? [a-z]{2,}")


def sentences() -> list[str]:
    """Every text of the code that has three words in a row, sorted."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    texts = {text for file in files for text in _texts(ast.parse(file.read_text(encoding="utf-8")))}
    return sorted(text for text in texts if SENTENCE.search(text))


def _texts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        inside = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        yield from (text for one in inside for text in _texts(one))
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
        yield from (text for one in ast.iter_child_nodes(node) for text in _texts(one))


if __name__ == "__main__":
    FILE.write_text(json.dumps(sentences(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
