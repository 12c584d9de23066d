"""What keeps the code easy to find one's way in, where the import contracts of ``make lint`` do not say it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ADAPTERS = sorted(file for folder in ("nodes", "webui_ext", "scripts") for file in (ROOT / folder).glob("*.py"))


def test_few_files_lie_directly_in_the_package() -> None:
    assert len(list((ROOT / "sd_lowvram").glob("*.py"))) <= 14


@pytest.mark.parametrize("file", ADAPTERS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_adapters_import_nothing_of_torch_that_is_private(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        private = [name for name in names if name.startswith("torch.") and "._" in name]
        assert not private, f"{file.name}, line {getattr(node, 'lineno', 0)}: {private}"


def test_private_parts_of_torch_are_touched_in_one_file() -> None:
    private = re.compile(r"\btorch(?!\.ops)(\.\w+)*\._[a-zA-Z]|\._cdata\b|\._version\b")
    places = {
        file.relative_to(ROOT).as_posix(): found
        for file in (ROOT / "sd_lowvram").rglob("*.py")
        if (found := sorted({match.group() for match in private.finditer(file.read_text(encoding="utf-8"))}))
    }
    places.pop("sd_lowvram/compat/private.py")
    assert not places


@pytest.mark.parametrize("file", ["search.py", "options.py"])
def test_the_search_knows_no_knob_by_name(file: str) -> None:
    tree = ast.parse((ROOT / "sd_lowvram" / "planning" / file).read_text(encoding="utf-8"))
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
    from sd_lowvram.settings import knobs

    assert words.isdisjoint(knobs())


def test_every_public_name_is_there_and_no_other() -> None:
    import sd_lowvram

    assert sd_lowvram.__all__ == [
        "AttentionBackend", "Fidelity", "Knob", "MemoryTrace", "Plan", "Settings", "attached", "decode", "encode",
        "errors", "max_size", "measured", "optimize", "plan", "register", "restore", "resumable", "trace",
    ]  # fmt: skip
    assert all(hasattr(sd_lowvram, name) for name in sd_lowvram.__all__)
